"""Buffers that a forward changes, in pipelines: what one stage writes, no other reads an old value of."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.errors import PlanError
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.serial_run import run_serially


def job(model: Any) -> Job:
    made = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, generator=made), torch.randint(0, 3, (), generator=made)) for _ in range(12)]
    return Job(
        model=model,
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch=12,
        accumulate=3,
    )


class Siamese(nn.Module):
    """Layers of batch norm that are called twice, one of them with a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8, momentum=None),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x) + self.body(x.flip(1)))
        return out


class Rebinds(nn.Module):
    """The backward needs the value that the buffer had."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.last((h * self.scale).tanh())
        self.scale = self.scale * 0.9 + 0.1 * h.detach().mean(0)
        return out


class ReadsTwice(nn.Module):
    """A stage can begin after the last use of the buffer alone."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.scale).tanh()
            self.scale = self.scale * 0.9 + 0.1 * x.detach().abs().mean()
        out: Tensor = self.head(x)
        return out


class HookWrites(Rebinds):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)

        def note(gradient: Tensor) -> None:
            self.scale.copy_(gradient.norm())

        h.register_hook(note)
        out: Tensor = self.last(h)
        return out


@pytest.mark.parametrize("model", [Siamese, Rebinds, ReadsTwice])
def test_pipelines_change_buffers_as_one_process_does(model: Any) -> None:
    captures = Captures(job(model))
    wanted = run_serially(job(model), resolve("single", 1), 3, torch.float32, captures=captures)
    for plan in ("1f1b", "zero-bubble"):
        found = run_serially(job(model), resolve(plan, 2), 3, torch.float32, captures=captures)
        for name, tensor in (wanted.weights | wanted.buffers).items():
            own = (found.weights | found.buffers)[name]
            assert torch.allclose(own, tensor, rtol=1e-4, atol=1e-6), (plan, name)


def test_a_buffer_that_the_backward_changes_is_refused() -> None:
    with pytest.raises(PlanError, match="the backward changes scale"):
        run_serially(job(HookWrites), resolve("1f1b", 2), 1, torch.float32)


def test_a_cut_between_two_uses_of_a_changed_buffer_is_refused() -> None:
    plan = resolve("1f1b", 2, {"pipe": {"cut": ["layers.1"]}})
    with pytest.raises(PlanError, match="scale, which the forward changes"):
        run_serially(job(ReadsTwice), plan, 1, torch.float32)
