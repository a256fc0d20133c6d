"""Optimizers that need whole tensors only late, or only of large ones, are known before a run cuts tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.run.updates import PLANS, collect, job_of, ranks_of
from torch import nn

from plait.job.job import Job
from plait.run.prepare.elementwise import check_divisible


class Normed(torch.optim.Optimizer):
    """Momentum, which some tensors divide by its norm in some steps."""

    def __init__(self, params: Any, start: int = 0, every: int = 1, least: int = 0, block: int = 0) -> None:
        super().__init__(params, {"lr": 0.1})
        self.start, self.every, self.least, self.block = start, every, least, block

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            if not kept:
                kept |= {"t": 0, "m": torch.zeros_like(parameter)}
            kept["t"] += 1
            update = kept["m"].mul_(0.5).add_(parameter.grad).clone().view(-1)
            if kept["t"] > self.start and kept["t"] % self.every == 0 and parameter.numel() >= self.least:
                for piece in update.split(self.block or update.numel()):
                    piece /= piece.norm()
            parameter.sub_(update.view_as(parameter), alpha=self.param_groups[0]["lr"])


class Counted(Normed):
    """Counts in an attribute of its own, in a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, least=1 << 60)
        self.count = torch.zeros(1)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.count += 1
        self.least = 0 if self.count > 200 else 1 << 60
        super().step()


class Ahead(torch.optim.Optimizer):
    """Wraps another one; every fifth step goes half way back to where the round began."""

    def __init__(self, params: Any, inner: Callable[..., torch.optim.Optimizer]) -> None:
        self.inner = inner(params)
        super().__init__(params, {})
        self.param_groups, self.rounds = self.inner.param_groups, 0
        self.slow: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        before = [p.clone() for p in self.param_groups[0]["params"]]
        self.inner.step()
        self.rounds += 1
        if self.rounds % 5 == 0:
            for parameter, old in zip(self.param_groups[0]["params"], before, strict=True):
                parameter.lerp_(old, 0.5)


class Table(torch.optim.SGD):
    """Has a rate for each of a hundred steps, and no more."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.done, self.rates = 0, [0.1 / (1 + step) for step in range(100)]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = self.rates[self.done]
        self.done += 1
        super().step()


SHAPES = [
    ("table", (3000, 64)),
    ("weight", (64, 96)),
    ("more", (64, 96)),
    ("third", (64, 96)),
    ("bias", (96,)),
]


@pytest.mark.parametrize(
    ("optimizer", "whole"),
    [
        (lambda ps: Normed(ps), True),
        (lambda ps: Normed(ps, start=5), True),
        (lambda ps: Normed(ps, start=900), True),
        (lambda ps: Normed(ps, every=10), True),
        (lambda ps: Normed(ps, every=100, start=300), True),
        (lambda ps: Normed(ps, least=4096), True),
        (lambda ps: Normed(ps, least=4096, block=256), True),
        (lambda ps: Normed(ps, least=1 << 60), False),
        (Counted, True),
        (lambda ps: Ahead(ps, torch.optim.SGD), False),
        (lambda ps: Ahead(ps, lambda own: Normed(own, start=40)), True),
        (Table, False),
        (lambda ps: torch.optim.Adafactor(ps), True),
        *[
            (lambda ps, kind=kind: kind(ps, lr=0.01), False)
            for kind in (torch.optim.AdamW, torch.optim.RAdam, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop)
        ],
    ],
)  # fmt: skip
def test_what_needs_whole_tensors_is_seen_before_it_happens(
    optimizer: Callable[..., Any], whole: bool
) -> None:
    job = Job(model=lambda: nn.Linear(1, 1), data=[], loss=nn.MSELoss(), optimizer=optimizer, batch=1)
    assert check_divisible(job, SHAPES, "zero3", between=True) is whole


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_one_that_begins_late_or_with_large_tensors_is_exact_on_several_ranks(plan: str) -> None:
    """Of the six steps the last three are late; in float64, where only the order of sums over ranks differs."""
    for fields in ({"start": 3}, {"least": 40}):
        job = job_of(optimizer=lambda ps, fields=fields: Normed(ps, **fields))
        one, several = ranks_of(job, "single", {}), ranks_of(job, plan, PLANS.get(plan, {"data": 2}))
        for step in range(6):
            assert one.run(step) and several.run(step)
        wanted, found = collect(one).parameters, collect(several).parameters
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)
