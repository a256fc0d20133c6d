"""Tensors that a forward keeps beside its parameters: in caches, in containers, by saved-tensor hooks, in variables."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ordinary import Base, job
from torch import Tensor, nn

from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially


class CachesPairs(Base):
    """As rotary embeddings keep cosines and sines."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def middle(self, h: Tensor) -> Tensor:
        if h.shape[1] not in self.cache:
            angles = torch.arange(h.shape[1]).to(h.dtype)
            self.cache[h.shape[1]] = (angles.cos(), angles.sin())
        cos, sin = self.cache[h.shape[1]]
        return h * cos + h.flip(1) * sin


class CachesByFunction(Base):
    """Kept for all models of the process by a class's own cache, which a capture empties."""

    @functools.lru_cache  # noqa: B019
    def mask(self, width: int) -> Tensor:
        return torch.arange(width) % 2

    def middle(self, h: Tensor) -> Tensor:
        return h * self.mask(h.shape[1])


class SavesCopies(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 2,), lambda t: t[0] / 2):
            out: Tensor = self.last(h.tanh().exp())
        return out


class Remembers(Base):
    """Two tensors of the last step, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None

    def middle(self, h: Tensor) -> Tensor:
        self.seen = [h.detach().mean(), {"largest": h.detach().amax()}]
        return h.tanh()


class Carries(Remembers):
    """Of which the next step reads one."""

    def middle(self, h: Tensor) -> Tensor:
        before = self.seen[0] if self.seen is not None else 0.0
        return super().middle(h) + before


class CountsInTheEnvironment(Base):
    def middle(self, h: Tensor) -> Tensor:
        count = int(os.environ.get("STEPS_OF_A_TEST", "0"))
        os.environ["STEPS_OF_A_TEST"] = str(count + 1)
        return h * (1 + count)


class SetsAVariableOnce(Base):
    def middle(self, h: Tensor) -> Tensor:
        os.environ["STEPS_OF_A_TEST"] = "0"
        return h.tanh()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPS_OF_A_TEST", raising=False)


@pytest.mark.parametrize("plan", ["ddp", "1f1b"])
@pytest.mark.parametrize("model", [CachesPairs, CachesByFunction, SavesCopies, Remembers, SetsAVariableOnce])
def test_is_captured_and_equals_eager(model: Callable[[], nn.Module], plan: str) -> None:
    given = job(model)
    captures = Captures(given, None, torch.float64)
    for _ in range(2):  # what the first left must not be in the way of another
        captures.forget()
        assert captures.of_size(6).gradients
    same(given, plan, captures)


@pytest.mark.parametrize("model", [Carries, CountsInTheEnvironment])
def test_what_the_next_step_reads_runs_eagerly(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = job(model)
    found = run_serially(given, resolve("single", 1), 2, torch.float64)
    assert "running eagerly" in " ".join(found.notices)
    monkeypatch.delenv("STEPS_OF_A_TEST", raising=False)
    one = run_eager(given, 2, torch.float64, Captures(given, None, torch.float64))
    assert found.losses == pytest.approx(one.losses, rel=1e-12)


def same(given: Job, plan: str, captures: Captures) -> None:
    one = run_eager(given, 2, torch.float64, captures)
    other = run_serially(given, resolve(plan, 2), 2, torch.float64, captures=captures)
    assert other.losses == pytest.approx(one.losses, rel=1e-12)
    for name, weight in one.weights.items():
        assert torch.allclose(other.weights[name], weight, rtol=1e-9, atol=1e-12), name
