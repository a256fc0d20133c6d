"""The learning rate of step k is a function of k."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from plait.errors import JobError
from plait.job import Schedule


def sgd(*rates: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0, momentum=momentum)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def warm_up(step: int) -> float:
    return 0.1 * min(1.0, (step + 1) / 10)


FACTORIES: dict[str, Callable[..., Any]] = {
    "step": functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 6]),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
}


def by_hand(factory: Callable[..., Any], num_steps: int) -> list[list[float]]:
    """What a plain torch loop has in each of its optimizer steps: rates of both groups, and the momentum."""
    optimizer = sgd(0.4, 0.04)
    scheduler = factory(optimizer)
    seen = []
    for _ in range(num_steps):
        seen.append([*rates_of(optimizer), optimizer.param_groups[0]["momentum"]])
        optimizer.step()
        scheduler.step()
    return seen


def test_without_a_schedule_the_rates_stay() -> None:
    optimizer = sgd(0.1, 0.2)
    schedule = Schedule(None, optimizer)
    optimizer.param_groups[1]["lr"] = 5.0
    schedule.apply(optimizer, 7)
    assert rates_of(optimizer) == [0.1, 0.2]


def test_a_function_of_the_step_keeps_the_ratio_of_the_groups() -> None:
    optimizer = sgd(0.1, 0.01)
    schedule = Schedule(lambda step: 0.5 / (step + 1), optimizer)
    schedule.apply(optimizer, 4)
    assert rates_of(optimizer) == pytest.approx([0.1, 0.01])
    schedule.apply(optimizer, 0)
    assert rates_of(optimizer) == pytest.approx([0.5, 0.05])


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step"
)  # SequentialLR's own, inside torch
@pytest.mark.parametrize("name", FACTORIES)
def test_a_torch_scheduler_gives_what_a_plain_loop_gives(name: str) -> None:
    expected = by_hand(FACTORIES[name], 15)
    optimizer = sgd(0.4, 0.04)
    schedule = Schedule(FACTORIES[name], optimizer)
    for step, row in enumerate(expected):
        schedule.apply(optimizer, step)
        assert [*rates_of(optimizer), optimizer.param_groups[0]["momentum"]] == row, f"step {step}"


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", FACTORIES)
def test_complaint_06_the_rate_depends_on_the_step_and_not_on_how_often_or_by_whom_it_is_asked(
    name: str,
) -> None:
    in_order = Schedule(FACTORIES[name], sgd(0.4, 0.04))
    expected = [in_order.rates(step) for step in range(12)]
    # As 4 ranks would have it, asking once per micro-batch; then back in time, and from step 9 as after a resume.
    for _ in range(4):
        rank = Schedule(FACTORIES[name], sgd(0.4, 0.04))
        assert [rank.rates(step) for step in range(12) for _ in range(3)] == [
            r for r in expected for _ in range(3)
        ]
        assert rank.rates(2) == expected[2]
        assert Schedule(FACTORIES[name], sgd(0.4, 0.04)).rates(9) == expected[9]


def test_complaint_06_a_step_function_is_called_with_the_optimizer_step() -> None:
    optimizer = sgd(0.1)
    schedule = Schedule(warm_up, optimizer)
    seen = []
    for step in range(12):
        schedule.apply(optimizer, step)
        seen.append(rates_of(optimizer)[0])
    assert seen == pytest.approx([0.01 * min(step + 1, 10) for step in range(12)])


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", FACTORIES)
def test_the_state_survives_json_and_an_optimizer_that_was_loaded(name: str) -> None:
    optimizer = sgd(0.4, 0.04)
    schedule = Schedule(FACTORIES[name], optimizer)
    schedule.apply(optimizer, 8)
    saved, saved_optimizer = json.loads(json.dumps(schedule.state_dict())), optimizer.state_dict()
    expected = [Schedule(FACTORIES[name], sgd(0.4, 0.04)).rates(step) for step in (8, 9, 10)]

    resumed_optimizer = sgd(0.4, 0.04)
    resumed = Schedule(FACTORIES[name], resumed_optimizer)
    resumed_optimizer.load_state_dict(saved_optimizer)
    resumed.load_state_dict(saved, 8)
    for step, row in zip((8, 9, 10), expected, strict=True):
        resumed.apply(resumed_optimizer, step)
        assert rates_of(resumed_optimizer) == list(row)


def test_a_state_with_other_initial_rates_is_refused() -> None:
    saved = Schedule(warm_up, sgd(0.1)).state_dict()
    with pytest.raises(JobError, match=r"\[0.2\]; the saved schedule started with \[0.1\]"):
        Schedule(warm_up, sgd(0.2)).load_state_dict(saved, 0)


def test_the_users_optimizer_is_left_alone() -> None:
    optimizer = sgd(0.4)
    schedule = Schedule(FACTORIES["one_cycle"], optimizer)
    keys = set(optimizer.param_groups[0])
    schedule.rates(5)
    assert rates_of(optimizer) == [0.4]
    assert set(optimizer.param_groups[0]) == keys
    assert not hasattr(optimizer.step, "_wrapped_by_lr_sched")


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.4)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = Schedule(FACTORIES["exponential"], optimizer)
    schedule.apply(optimizer, 1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.36)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_a_rate_that_is_no_rate_is_refused(value: float) -> None:
    with pytest.raises(JobError, match=r"schedule\(3\) is"):
        Schedule(lambda step: value, sgd(0.1)).rates(3)


def annotated(of: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ConstantLR(of, factor=0.5)


@pytest.mark.parametrize(
    "factory",
    [lambda opt: lr_scheduler.ConstantLR(opt, factor=0.5), lambda o: lr_scheduler.ConstantLR(o, factor=0.5), annotated],
    ids=["short", "any", "annotated"],
)  # fmt: skip
def test_a_factory_is_known_by_its_signature_or_by_what_it_makes(factory: Callable[..., Any]) -> None:
    optimizer = sgd(0.1)
    assert Schedule(factory, optimizer).rates(0) == (0.05,)
    assert rates_of(optimizer) == [0.1]


def test_a_function_of_the_step_may_call_it_anything() -> None:
    assert Schedule(lambda t: 0.1 / (t + 1), sgd(0.1)).rates(4) == (0.02,)
    with pytest.raises(
        JobError, match=r"schedule\(0\) gave no learning rate at .*test_schedule.py.*ZeroDivision"
    ):
        Schedule(lambda t: 1 / t, sgd(0.1)).rates(0)


def test_a_factory_that_returns_something_else_is_refused() -> None:
    with pytest.raises(JobError, match=r"returned the float 0\.1"):
        Schedule(lambda optimizer: 0.1, sgd(0.1)).rates(0)


def test_groups_that_cannot_be_scaled_or_do_not_match_are_refused() -> None:
    with pytest.raises(JobError, match="ratio to group 0, which is 0"):
        Schedule(warm_up, sgd(0.0, 0.1)).rates(0)
    with pytest.raises(JobError, match="made for 1 parameter groups; this optimizer has 2"):
        Schedule(warm_up, sgd(0.1)).apply(sgd(0.1, 0.1), 0)


def test_a_plateau_depends_on_what_was_measured_and_is_saved_with_it() -> None:
    def made() -> Schedule:
        return Schedule(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), sgd(1.0))

    schedule = made()
    assert schedule.follows and schedule.rates(0) == (1.0,)
    schedule.observe(3.0)
    assert schedule.rates(1) == (1.0,), "the first value is a baseline"
    schedule.observe(3.0)
    assert schedule.rates(2) == (0.1,)
    resumed = made()
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())), 2)
    for one in (schedule, resumed):
        one.observe(2.0)
        one.observe(2.5)
    assert resumed.rates(3) == schedule.rates(3) == pytest.approx((0.01,))
    assert not Schedule(lambda step: 0.1, sgd(0.1)).follows
    fresh = made()
    fresh.load_state_dict(json.loads(json.dumps(made().state_dict())), 0)
    assert fresh.rates(0) == (1.0,), "nothing was measured yet: the best is infinity"
