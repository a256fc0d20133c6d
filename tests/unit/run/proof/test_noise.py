"""What rounding alone does is no difference, tensor by tensor; what a fault does still is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.job.job import Job
from plait.run.proof.compare import compare, noise_of
from plait.run.proof.serial_run import Record
from plait.run.verify import verify


class Attends(nn.Module):
    """The gradient of a key's bias is zero but for rounding, of which AdamW makes steps of full length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        return self.last(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def attends(precision: Any) -> Job:
    return Job(
        model=Attends, data=(torch.randint(0, 20, (8, 6)), torch.randint(0, 4, (8,))), batch=8, steps=2,
        loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), precision=precision,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights", "fp16"])
def test_gradients_that_are_noise_are_no_difference(precision: Any) -> None:
    outcome = verify(attends(precision), "ddp", 2, steps=2, serial=True, fp32=True)
    assert outcome.ok, (outcome.first, outcome.eager_first)


def without_the_last(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors[:-1])).sum(0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights"])
def test_a_fault_is_seen_all_the_same(precision: Any) -> None:
    job = attends(precision)
    outcome = verify(job, "ddp", 2, steps=2, serial=True, fp32=True, reduce=without_the_last)
    assert not outcome.ok


def test_noise_is_of_single_tensors_and_never_infinite() -> None:
    tensors = {name: torch.tensor([1.0, 2.0], dtype=torch.float64) for name in ("quiet", "noisy", "lost")}
    exact = Record(
        losses=(1.0,), norms=None, gradients=(tensors,), weights=tensors, buffers={}, spread=0.0, notices=()
    )
    other = {**tensors, "noisy": 1.25 * tensors["noisy"], "lost": tensors["lost"] / 0}
    noise = noise_of(replace(exact, gradients=(other,), weights=other), exact)
    assert noise.gradients == noise.weights and "lost" not in noise.weights
    assert noise.weights["quiet"] == 0.0 and 0.1 < noise.weights["noisy"] < 0.3
    wrong = {name: 1.5 * tensor for name, tensor in tensors.items()}
    limits: dict[str, Any] = {"rough": True, "tolerance": 1e-5, "weight_tolerance": 1e-5, "noise": noise}
    found = compare(exact, replace(exact, gradients=(wrong,), weights=wrong), **limits)
    assert {entry.name.split()[0] for entry in found if not entry.ok} == {"quiet", "lost"}


def test_weights_beside_statistics_stay_wide() -> None:
    """Torch has no kernel for a batch norm of short weights and float32 statistics."""
    data = (torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,)))
    job = Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.InstanceNorm2d(8, affine=True), nn.Flatten(),
            nn.Linear(128, 4),
        ),
        data=data, evaluate=data, batch=8, steps=2, loss=nn.CrossEntropyLoss(), precision="bf16-weights",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    dtypes = {name: p.dtype for name, p in job.build_model().named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"1.weight", "1.bias"}
    for plan in ("ddp", "zero3"):
        outcome = verify(job, plan, 2, steps=2, serial=True, fp32=True)
        assert outcome.ok, (outcome.first, outcome.eager_first)
        assert not any("not compared" in notice for notice in outcome.notices)
