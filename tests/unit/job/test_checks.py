"""Contradictions between job, data and ranks: all of them, before anything starts."""

import pytest
import torch
from torch import nn

from plait.job import Job, problems


def make(batch: int, accumulate: int = 1) -> Job:
    return Job(
        model=lambda: nn.Linear(1, 1),
        data=torch.zeros(4, 1),
        objective=lambda model, batch: model(batch).mean(),
        optimizer=torch.optim.SGD,
        batch=batch,
        accumulate=accumulate,
    )


def test_complaint_08_batch_smaller_than_ranks_is_one_line_with_the_numbers() -> None:
    (problem,) = problems(make(batch=2), 100, 4)
    assert problem.startswith("batch=2 is smaller than ranks=4")
    assert "\n" not in problem


def test_complaint_08_all_problems_are_returned() -> None:
    assert len(problems(make(batch=2), 3, 4)) == 2


@pytest.mark.parametrize(
    ("batch", "accumulate", "num_samples", "ranks"),
    [(4, 1, 4, 4), (5, 1, 97, 3), (4, 4, 97, 4), (64, 1, 10, 4), (4, 1, None, 4), (1, 1, 1, 1)],
)
def test_unequal_and_empty_shares_are_allowed(
    batch: int, accumulate: int, num_samples: int | None, ranks: int
) -> None:
    assert problems(make(batch, accumulate), num_samples, ranks) == []


def test_too_few_samples_and_impossible_ranks() -> None:
    assert "3 samples, fewer than ranks=4" in problems(make(batch=8), 3, 4)[0]
    assert "0 samples" in problems(make(batch=8), 0, 4)[0]
    assert "ranks=0" in problems(make(batch=8), 3, 0)[0]
