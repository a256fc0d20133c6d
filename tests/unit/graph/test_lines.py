"""The line that is named where capture is given up: the user's, or that of a library of models, on every path."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.errors import CaptureError
from plait.folders import TORCH
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially

HERE = Path(__file__)


def job(model: Callable[[], nn.Module], **fields: Any) -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    return Job(
        model=lambda: model().double(), data=(x, torch.arange(12) % 3), loss=nn.CrossEntropyLoss(), batch=6, steps=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **fields,
    )  # fmt: skip


def refusal(model: Callable[[], nn.Module]) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        _ = Captures(job(model)).of_size(6).graph
    return caught.value


def named(text: str) -> str:
    """The line of this file that ends in a comment."""
    lines = HERE.read_text().splitlines()
    return f"{HERE}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {text}'))}"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.mark = nn.Parameter(torch.randn(8))

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


LIBRARY = """
import torch

class Layer(torch.nn.Module):
    def forward(self, h):
        return h + h[h > 0].sum()
"""


def test_a_package_whose_name_begins_like_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch_geometric's and torchvision's do, which lie beside it."""
    file, layers = f"{TORCH.removesuffix('/')}_layers/layer.py", ModuleType("torch_layers")
    monkeypatch.setitem(sys.modules, "torch_layers", layers)
    exec(compile(LIBRARY, file, "exec"), vars(layers))

    class Around(Base):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layers.Layer()
            self.layer.mark = nn.Parameter(torch.zeros(500))  # too large a part of the model for an island

        def middle(self, h: Tensor) -> Tensor:
            return self.layer(h)

    assert refusal(Around).where == f"{file}:6"


class Numpy(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * float(np.mean(h.detach()))  # through numpy


def test_packages_that_do_not_know_torch_are_called_by_the_line() -> None:
    assert refusal(Numpy).where == named("through numpy")


class Backward(Base):
    def middle(self, h: Tensor) -> Tensor:
        chosen = h.detach() > 0
        return h.index_put((chosen,), self.mark[:1])  # counted by its gradient


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.randn(1))

    def forward(self, h: Tensor) -> Tensor:
        return h.index_put((h.detach() > 0,), self.mark)


class BackwardInside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def middle(self, h: Tensor) -> Tensor:
        return self.inner(h)


def test_what_the_backward_cannot_do_is_told_by_the_line_of_the_forward() -> None:
    error = refusal(Backward)
    assert error.where == named("counted by its gradient") and "the gradient of" in error.what


def test_a_module_whose_backward_needs_values_is_an_island() -> None:
    given = job(BackwardInside)
    captures = Captures(given, None, torch.float64)
    assert any("inner cannot be captured" in notice for notice in captures.of_size(6).notices)
    same(given, "1f1b", captures)


class Drawing(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        kept = h[h.sum(1) > 0]  # the first reason
        return h + kept.sum() + torch.rand(1, dtype=h.dtype)


class Island(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Drawing()

    def middle(self, h: Tensor) -> Tensor:
        return self.inner(h)


def test_a_module_that_cannot_run_by_itself_is_told_with_what_stopped_it_first() -> None:
    error = refusal(Island)
    assert error.where == named("the first reason")
    assert "cannot run by itself" in error.what and "draws random numbers" in error.what


class IslandBehindABranch(Island):
    def middle(self, h: Tensor) -> Tensor:
        return super().middle(h * 2 if (h.sum() > 0).item() else h)


def test_what_we_refuse_in_one_of_several_ways_is_no_error_of_the_model() -> None:
    error = refusal(IslandBehindABranch)
    assert error.where == named("the first reason") and "draws random numbers" in error.what


def drawn() -> float:
    return float(np.random.rand())  # by numpy


class DrawsByNumpy(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * drawn()


def test_draws_of_a_function_that_the_model_calls_are_found() -> None:
    error = refusal(DrawsByNumpy)
    assert error.where == f"{HERE}:{drawn.__code__.co_firstlineno + 1}" and "torch.rand" in str(error.fix)


class AskedTwice(Base):
    """One question, asked again after writes into other tensors."""

    def middle(self, h: Tensor) -> Tensor:
        positive = (h.sum() > 0).item()
        if positive:
            more = h * 2
        out = torch.zeros_like(h)
        out[:, 1] = h[:, 0]
        return out + more if positive else out + h


def test_the_same_question_has_one_answer_whatever_is_written_elsewhere() -> None:
    given = job(AskedTwice)
    captures = Captures(given, None, torch.float64)
    assert "all 2 ways" in " ".join(captures.of_size(6).notices)
    for plan in ("ddp", "1f1b"):
        same(given, plan, captures)


class AskedAfterAWrite(Base):
    def middle(self, h: Tensor) -> Tensor:
        seen = h.detach().clone()
        part = seen[:, :4]
        if (seen.sum() > 0).item():
            h = h * 2
        part.fill_(-100.0)
        if (seen.sum() > 0).item():
            h = h + 100
        return h


def test_a_write_through_a_view_makes_it_another_question() -> None:
    given = job(AskedAfterAWrite)
    captures = Captures(given, None, torch.float64)
    assert "all 4 ways" in " ".join(captures.of_size(6).notices)
    same(given, "ddp", captures)


class Masked(Base):
    """As speech models mask features."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def middle(self, h: Tensor) -> Tensor:
        h, mask = torch.stack([h, h.tanh()], 1), (h.detach() > 0)[:, :2]
        if self.kind == "rows":
            h[mask] = self.mark
        elif self.kind == "a row":
            h[mask] = self.mark[None]
        elif self.kind == "a view":
            h[:, 1][mask[:, 1]] = self.mark
        else:
            h[h.detach() > 0.5] = self.mark[:1]
        return h.sum(1)


@pytest.mark.parametrize("kind", ["rows", "a row", "a view", "numbers"])
def test_one_value_in_all_places_of_a_mask_is_captured(kind: str) -> None:
    given = job(lambda: Masked(kind), accumulate=2)
    same(given, "1f1b", Captures(given, None, torch.float64))


def same(given: Job, plan: str, captures: Captures) -> None:
    one = run_eager(given, 2, torch.float64, captures)
    other = run_serially(given, resolve(plan, 2), 2, torch.float64, captures=captures)
    assert other.losses == pytest.approx(one.losses, rel=1e-12)
    for name, weight in one.weights.items():
        assert torch.allclose(other.weights[name], weight, rtol=1e-9, atol=1e-12), name
