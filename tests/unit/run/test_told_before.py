"""What is known before a run begins is told, or refused, before anything is compiled."""

import itertools
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from plait.errors import JobError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs

DATA = [(torch.ones(4), torch.tensor(0))] * 12


def job(**changes: Any) -> Job:
    plain = Job(
        model=lambda: nn.Linear(4, 2), data=DATA, loss=nn.CrossEntropyLoss(), batch=4, steps=3,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return replace(plain, **changes)


def notices(given: Job, plan: str, ranks: int, **settings: Any) -> str:
    told: list[dict[str, Any]] = []
    prepare(given, resolve(plan, ranks, settings), "cpu", torch.float32, told.append)
    return " ".join(line for event in told for line in event.get("notices", ()))


def test_a_center_that_does_not_move_is_told() -> None:
    told = notices(job(), "easgd", 3)
    assert (
        "workers meet every 4 steps (elastic.tau=4) and the run has 3; to its end the center has not moved"
        in told
    )
    assert "center" not in notices(job(), "easgd", 3, elastic={"tau": 2})
    early = notices(job(steps=8, evaluate=DATA, evaluate_every=2), "easgd", 3)
    assert "in evaluations before that the center has not moved" in early
    assert "workers meet every 50 steps (average.every=50) and the run has 3" in notices(job(), "diloco", 2)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (lambda step: "fast", r"schedule\(0\) gave no learning rate"),
        (
            lambda step: [0.1, 0.2][step],
            r"schedule\(4\) gave no learning rate at .*test_told_before.py.*IndexError",
        ),
        (lambda optimizer: 0.1, "not a torch LRScheduler"),
        (
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=2),
            "the scheduler, asked for the rate of step",
        ),
    ],
    ids=["no number", "too short", "no scheduler", "ends early"],
)
def test_a_schedule_is_refused_before_anything_is_compiled(
    schedule: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Programs, "for_step", lambda *given: pytest.fail("compiled"))
    with pytest.raises(JobError, match=told):
        prepare(job(schedule=schedule, steps=5), resolve("ddp", 2), "cpu", torch.float32, lambda event: None)


def test_a_batch_that_the_data_does_not_fill_is_told() -> None:
    assert "the batch is 100, and the data has 12 samples: every step has 12" in notices(
        job(batch=100), "single", 1
    )
    assert "every step has" not in notices(job(batch=12), "single", 1)


def test_a_model_that_is_another_one_each_time_is_refused() -> None:
    widths = itertools.count(3)

    def network() -> nn.Module:
        width = next(widths)
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))

    with pytest.raises(JobError, match=r"another network each time: 0.weight was \[3, 4\], then \[\d, 4\]"):
        notices(job(model=network), "single", 1)


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_rate_that_is_no_number_is_refused(rate: float) -> None:
    with pytest.raises(JobError, match=f"the learning rate of SGD is {rate}"):
        notices(job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate)), "single", 1)


class Leaves(nn.Module):
    """Ends the process, as a script does that has seen enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(4)


def test_code_that_ends_the_process_is_named() -> None:
    with pytest.raises(JobError, match=r"test_told_before.py:\d+: SystemExit: 4"):
        notices(job(model=Leaves), "single", 1)
    with pytest.raises(JobError, match=r"model\(\) failed at .*test_told_before.py:\d+: SystemExit: 5"):
        notices(job(model=lambda: sys.exit(5)), "single", 1)


def test_what_a_layer_of_torch_was_given_is_told() -> None:
    with pytest.raises(JobError, match="which was given None at .*: TypeError"):
        notices(
            job(data=[None] * 12, objective=lambda model, batch: model(None).sum(), loss=None), "single", 1
        )
