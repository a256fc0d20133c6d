"""The networks and plans that are drawn.

Sizes are small enough that every element of a matrix can be seen; each picture is one step under one plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from plait.job.job import Job

SAMPLES, WIDTH, HIDDEN, OUT = 8, 4, 8, 6


class MLP(nn.Module):
    """Two layers, written as in a textbook: h = x W1, a = relu(h), y = a W2."""

    def __init__(self) -> None:
        super().__init__()
        self.W1 = nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.W2 = nn.Parameter(torch.randn(HIDDEN, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.W1) @ self.W2


class Block(nn.Module):
    """The MLP between two norms, as in a transformer: now the gradient of its input is needed too."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH, bias=False)
        self.mlp = MLP()
        self.after = nn.LayerNorm(OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.after(self.mlp(self.before(x)))
        return output


class Convolutions(nn.Module):
    """Two convolutions along a signal of 16 values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.second = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.relu(self.first(x)))
        return output


def job(model: Callable[[], nn.Module], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Job:
    """A step on samples of these shapes."""
    return Job(
        model=model,
        data=TensorDataset(torch.zeros(SAMPLES, *inputs), torch.zeros(SAMPLES, *outputs)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch=SAMPLES,
        steps=1,
    )


LABELS = {
    "batch.0": "x", "batch.1": "target", "mm": "h", "relu": "a", "mm_1": "y", "mse_loss": "loss",
    "mse_loss_backward": "dy", "mm_3": "da", "threshold_backward": "dh",
}  # fmt: skip
"""What the tensors of the MLP's graph are called in a textbook; gradients of parameters are called d and their name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One picture."""

    title: str
    plan: str
    mesh: Mapping[str, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, str] = field(default_factory=dict)
    """Placements of the batch on `tensor`, as they would be in the middle of a network."""
    job: Callable[[], Job] = lambda: job(MLP, (WIDTH,), (OUT,))
    samples: int = SAMPLES
    labels: Mapping[str, str] = field(default_factory=lambda: LABELS)


def _block() -> Job:
    return job(Block, (SAMPLES, WIDTH), (SAMPLES, OUT))


def _positions() -> Job:
    return job(MLP, (SAMPLES, WIDTH), (SAMPLES, OUT))


def _signal() -> Job:
    return job(Convolutions, (1, 16), (1, 16))


_BLOCK = LABELS | {
    "native_layer_norm": "n", "native_layer_norm_1": "z", "mse_loss_backward": "dz", "native_layer_norm_backward": "dy",
    "mm_5": "dn", "before.weight": "g1", "after.weight": "g2",
}  # fmt: skip
_SIGNAL = LABELS | {
    "first.weight": "w1", "second.weight": "w2", "convolution": "h", "convolution_1": "y", "convolution_backward": "da",
}  # fmt: skip

PICTURES: Mapping[str, Picture] = {
    "ddp": Picture(title="ddp: each rank has its samples", plan="ddp", mesh={"data": 2}),
    "zero1": Picture(title="zero1: the optimizer state is cut", plan="zero1", mesh={"data": 2}),
    "zero2": Picture(title="zero2: gradients are cut too", plan="zero2", mesh={"data": 2}),
    "zero3": Picture(
        title="zero3: parameters are cut too", plan="zero3", mesh={"data": 2}, settings={"sync": {"bucket_mib": 0}}
    ),
    "megatron": Picture(title="megatron: W1 by columns, W2 by rows", plan="megatron", mesh={"tensor": 2}),
    "megatron_block": Picture(
        title="megatron behind a norm: one sum forward, one backward",
        plan="megatron", mesh={"tensor": 2}, job=_block, samples=1, labels=_BLOCK,
    ),
    "megatron_sequence": Picture(
        title="megatron with tensor.sequence=true: each sum becomes a scatter and a gather",
        plan="megatron", mesh={"tensor": 2}, settings={"tensor": {"sequence": True}}, job=_block, samples=1,
        batch={"batch.*": "S(1)"},
        labels=_BLOCK,
    ),
    "domain": Picture(
        title="domain: each rank has its positions of every sample",
        plan="domain", mesh={"domain": 2}, job=_positions, samples=1,
    ),
    "domain_convolution": Picture(
        title="domain with convolutions: neighbours exchange their edges",
        plan="domain", mesh={"domain": 2}, settings={"domain": {"dim": 2}}, job=_signal, samples=1, labels=_SIGNAL,
    ),
    "data_tensor": Picture(
        title="data x tensor: samples and weights cut", plan="megatron", mesh={"data": 2, "tensor": 2}
    ),
}  # fmt: skip
