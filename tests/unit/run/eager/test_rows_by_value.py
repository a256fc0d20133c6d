"""Code that runs eagerly draws the same numbers on shares as on the whole, where values decide which rows there are."""

# mypy: ignore-errors

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.serial_run import Record, run_serially

WIDTH, STEPS = 6, 3


class Experts(nn.Module):
    """Each row goes to one of them, and those that have no rows are not run."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.gate = nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 8),
                *([nn.BatchNorm1d(8)] if norm else []),
                nn.Dropout(0.4),
                nn.Linear(8, WIDTH),
            )
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen, out = self.gate(rows).argmax(-1), torch.zeros_like(rows)
        if self.norm:  # whole samples, as torch wants more than one row
            chosen = self.gate(x.mean(1)).argmax(-1).repeat_interleave(3)
        for number in chosen.unique().tolist():
            (at,) = torch.where(chosen == number)
            out = out.index_add(0, at, self.experts[number](rows[at]))
        return self.head(F.dropout(out, 0.2).view_as(x).mean(1))


class OneByOne(nn.Module):
    """Samples one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = [F.dropout(self.body(one[one[:, 0] > -9]), 0.4).mean(0) for one in x.unbind(0)]
        if float(x[0, 0, 0]) > 1e9:  # values decide, but never so
            return self.head(torch.stack(made).nonzero().float())
        return self.head(torch.stack(made))


class AcrossSamples(nn.Module):
    """A norm of one's own, over the batch, in code that values stop."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = (x - x.mean(0)) / (x.std(0, unbiased=False) + 0.1)
        return self.head(h[:, h[0, :, 0].nonzero()[:, 0]].mean(1))


def job(model: Any, **given: Any) -> Job:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, WIDTH, generator=draw)
    return Job(
        model=model,
        data=[(x[i], torch.tensor(i % 3)) for i in range(20)],
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=STEPS,
        **{"batch": 5, **given},
    )


def run(made: Job, plan: str, ranks: int) -> Record:
    return run_serially(made, resolve(plan, ranks), STEPS, torch.float64)


def assert_same(found: Record, wanted: Record) -> None:
    """Sums of shares are added up in another order: float64's last digits."""
    assert any("running eagerly" in notice for notice in found.notices)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(found.weights[name].view_as(tensor), tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("plan", "ranks"), [("ddp", 2), ("ddp", 4), ("zero3", 3)])
def test_rows_that_values_choose_draw_in_the_order_of_samples(plan: str, ranks: int) -> None:
    """Ranks reach other experts, and draw another number of times."""
    made = job(Experts)
    found = run(made, plan, ranks)
    assert_same(found, run(made, "single", 1))
    assert not [notice for notice in found.notices if "how the batch is shared" in notice]


def test_ranks_that_reach_other_norms_wait_for_each_other_at_those_that_both_reach() -> None:
    made = job(lambda: Experts(norm=True), batch=12)
    assert_same(run(made, "ddp", 3), run(made, "single", 1))


def test_samples_that_are_looked_at_one_by_one_draw_their_own_numbers() -> None:
    made = job(OneByOne)
    assert_same(run(made, "ddp", 2), run(made, "single", 1))


def test_a_forward_that_looks_across_samples_is_told_with_numbers() -> None:
    found = run(job(AcrossSamples), "ddp", 2)
    (told,) = [notice for notice in found.notices if "how the batch is shared: tried on 3 samples" in notice]
    assert "Plan single has no shares" in told
