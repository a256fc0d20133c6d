"""What Inductor may not know: ops of the user's own, complex and random numbers: right, or as written and named."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.job.job import Job
from plait.plan.named import resolve
from plait.program.segment import compiled
from plait.run.proof.serial_run import run_serially

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler (Debian: g++)"),
]


@torch.library.custom_op("plait_test_kinds::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """An op that nobody else knows."""
    return x**3


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("plait_test_kinds::column", mutates_args=())
def column(x: Tensor) -> Tensor:
    """What it returns lies otherwise than its rule says."""
    return (2 * x).t().contiguous().t()


@column.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


column.register_autograd(lambda ctx, grad: torch.ops.plait_test_kinds.column(grad))


class Kind(nn.Module):
    """A layer of the kind, between two that everybody knows."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(6, 8), nn.Linear(8, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def spectrum(x: Tensor) -> Tensor:
    turned = torch.fft.fft(x)
    return torch.fft.ifft(turned.conj() * turned * torch.tensor(0.5 + 0.5j, dtype=turned.dtype)).real


def noisy(x: Tensor) -> Tensor:
    return nn.functional.dropout(x + 0.1 * torch.randn_like(x), 0.3) * (1 + torch.rand_like(x))


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "own": torch.ops.plait_test_kinds.cube,
    "complex": spectrum,
    "random": noisy,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["single", "ddp"])
def test_every_kind_of_op_is_right(kind: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str | None]] = []
    monkeypatch.setattr(compiled, "_untold", lambda name, _, reason: told.append((name, reason)))
    job = Job(
        model=lambda: Kind(KINDS[kind]), data=(torch.randn(8, 6), torch.randint(0, 3, (8,))), batch=8, steps=2,
        loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    ranks = 2 if plan == "ddp" else 1
    plain, fast = (
        run_serially(job, resolve(plan, ranks, {"compile": how}, None), 2, torch.float64)
        for how in ("off", "on")
    )
    assert fast.losses == pytest.approx(plain.losses, rel=1e-9)
    gaps: dict[str, Any] = {n: (fast.weights[n] - weight).abs().max() for n, weight in plain.weights.items()}
    assert max(gaps.values()) < 1e-9, gaps
    assert any(reason is None for _, reason in told), "something was compiled"
    refused = [name for name, reason in told if reason is not None]
    assert len(refused) == len(set(refused)), told
    if kind != "complex":
        assert not refused, told


def test_an_op_whose_rule_says_how_it_does_not_lie_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str | None]] = []
    monkeypatch.setattr(compiled, "_untold", lambda name, _, reason: told.append((name, reason)))
    job = Job(
        model=lambda: Kind(torch.ops.plait_test_kinds.column), data=(torch.randn(8, 6), torch.randint(0, 3, (8,))),
        batch=8, steps=3, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    plain, fast = (
        run_serially(job, resolve("single", 1, {"compile": how}, None), 3, torch.float64)
        for how in ("off", "on")
    )
    assert fast.losses == pytest.approx(plain.losses, rel=1e-9)
    told = [(name, reason) for name, reason in told if reason is not None]
    assert len(told) == len(set(told)) and told
    assert all("lies otherwise than its rule says" in str(reason) for _, reason in told)


class Sentences(nn.Module):
    """A table before a recurrent layer: what is looked up is turned on its way in, its gradient on its way out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(10, 3)
        self.cell = nn.LSTM(4, 5, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(self.table(x))[0].mean(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_recurrent_layer_behind_a_table(dtype: torch.dtype) -> None:
    job = Job(
        model=Sentences, data=(torch.randint(0, 9, (8, 3)), torch.randint(0, 3, (8,))), batch=8, steps=2,
        loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    plain, fast = (
        run_serially(job, resolve("single", 1, {"compile": how}, None), 2, dtype) for how in ("off", "on")
    )
    near = 1e-9 if dtype == torch.float64 else 1e-5
    for name, weight in plain.weights.items():
        assert torch.allclose(weight, fast.weights[name], rtol=0, atol=near), name
