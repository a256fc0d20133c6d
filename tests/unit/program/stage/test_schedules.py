"""Schedules are complete, free of deadlocks and as hungry as published; what is not one is refused."""

from dataclasses import replace
from itertools import product

import pytest
from tests.unit.program.stage.schedule_proof import check_schedule

from plait.errors import PlanError, ProgramError
from plait.program.check.soundness import check_program
from plait.program.simulate.schedule_clock import program_of_schedule
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import Action, Costs, peak_in_flight
from plait.program.stage.schedules.zero_bubble import zero_bubble_h2

SHAPES = tuple(product((1, 2, 3, 4, 6), (1, 2, 4, 5, 7, 12)))
SEVERAL = ("naive", "gpipe", "interleaved")
"""Schedules with several stages a rank."""


def in_flight(name: str, ranks: int, rank: int, stages_a_rank: int, micro_batches: int) -> int:
    """What is published of each schedule's memory, in activations of one stage."""
    published = {
        "naive": stages_a_rank,
        "gpipe": micro_batches * stages_a_rank,
        "1f1b": ranks - rank,
        "interleaved": 2 * (ranks - rank - 1) + (stages_a_rank - 1) * ranks + 1,
        "zero-bubble": ranks,
        "zero-bubble-2": 2 * ranks - 1,
    }
    if name == "interleaved" and stages_a_rank == 1:
        return ranks - rank
    return min(published[name], micro_batches * stages_a_rank)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages_a_rank", [1, 2, 3])
def test_every_schedule_is_one(name: str, stages_a_rank: int) -> None:
    """Ragged numbers of micro-batches included: fewer than ranks, and such that ranks do not divide."""
    if stages_a_rank > 1 and name not in SEVERAL:
        with pytest.raises(PlanError, match=f"one stage a rank; the plan asks for {stages_a_rank}") as raised:
            SCHEDULES[name](2, stages_a_rank, 4)
        assert raised.value.fix is not None and "interleaved" in raised.value.fix
        return
    for ranks, micro_batches in SHAPES:
        actions = SCHEDULES[name](ranks, stages_a_rank, micro_batches)
        check_schedule(actions, stages_a_rank=stages_a_rank, micro_batches=micro_batches)
        check_program(program_of_schedule(name, actions))


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_is_as_published(name: str) -> None:
    for ranks, micro_batches in SHAPES:
        stages_a_rank = 2 if name == "interleaved" else 1
        peaks = peak_in_flight(SCHEDULES[name](ranks, stages_a_rank, micro_batches))
        most = [in_flight(name, ranks, rank, stages_a_rank, micro_batches) for rank in range(ranks)]
        if micro_batches % ranks == 0 or name in ("naive", "gpipe", "1f1b"):
            assert peaks == [min(bound, micro_batches * stages_a_rank) for bound in most], (
                ranks,
                micro_batches,
            )
        else:
            assert all(peak <= bound for peak, bound in zip(peaks, most, strict=True))


def text(own: list[Action]) -> str:
    letters = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
    return " ".join(f"{letters[action.kind]}{action.micro_batch}" for action in own)


def test_orders_as_drawn_in_the_papers() -> None:
    assert text(SCHEDULES["naive"](2, 1, 2)[0]) == "F0 B0 F1 B1"
    assert text(SCHEDULES["gpipe"](2, 1, 3)[1]) == "F0 F1 F2 B0 B1 B2"
    assert text(SCHEDULES["1f1b"](3, 1, 4)[0]) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(SCHEDULES["1f1b"](3, 1, 4)[2]) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text(SCHEDULES["zero-bubble"](2, 1, 4)[0]) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    assert text(SCHEDULES["zero-bubble"](2, 1, 4)[1]) == "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"
    assert text(SCHEDULES["zero-bubble-2"](2, 1, 4)[0]) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert text(SCHEDULES["zero-bubble-2"](2, 1, 4)[1]) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_interleaved_takes_groups_of_micro_batches_through_its_stages() -> None:
    own = SCHEDULES["interleaved"](2, 2, 4)[1]
    assert [(a.stage, a.micro_batch) for a in own if a.kind == "forward"] == [
        (1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3),
    ]  # fmt: skip
    assert [(a.stage, a.micro_batch) for a in own if a.kind == "backward"] == [
        (3, 0), (3, 1), (1, 0), (1, 1), (3, 2), (3, 3), (1, 2), (1, 3),
    ]  # fmt: skip
    assert SCHEDULES["interleaved"](3, 1, 5) == SCHEDULES["1f1b"](3, 1, 5)


def test_cheap_weight_gradients_lag_further_behind() -> None:
    costs = Costs(forward=2.0, input=2.0, weight=1.0)
    last = text(zero_bubble_h2(2, 1, 8, costs=costs)[1])
    assert last.index("W0") > last.index("I4")
    check_schedule(zero_bubble_h2(4, 1, 7, costs=costs), stages_a_rank=1, micro_batches=7)


def planted(change: str) -> list[list[Action]]:
    """1F1B on 2 ranks with one fault."""
    actions = SCHEDULES["1f1b"](2, 1, 3)
    own = actions[1]
    if change == "missing":
        own.pop()
    elif change == "twice":
        own.append(own[0])
    elif change == "stranger":
        own[0] = replace(own[0], stage=0)
    elif change == "weight first":
        own[-1:] = [Action("weight", 1, 2), Action("input", 1, 2)]
    elif change == "gradients out of order":
        actions[0][-2:] = reversed(actions[0][-2:])
    elif change == "deadlock":
        for given in actions:  # F0 B0 F1 ... on rank 0, F0 F1 B0 ... on rank 1
            given[1], given[2] = given[2], given[1]
    return actions


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", "rank 1 does forward for stage 1, micro-batch 2"),
        ("twice", "rank 1 does forward, backward, forward for stage 1, micro-batch 0"),
        ("stranger", "forward of stage 0, micro-batch 0 is not for rank 1"),
        ("weight first", "rank 1 does forward, weight, input for stage 1, micro-batch 2"),
        (
            "gradients out of order",
            "rank 0 does backward of stage 0, micro-batch 1 after backward of stage 0, micro",
        ),
        (
            "deadlock",
            r"rank 0 in backward of stage 0, micro-batch 0 .*rank 1 in forward of stage 1, micro-batch 1",
        ),
    ],
)
def test_what_is_no_schedule_is_told(change: str, says: str) -> None:
    check_schedule(planted("nothing"), stages_a_rank=1, micro_batches=3, in_flight=2)
    with pytest.raises(ProgramError, match=says):
        check_schedule(planted(change), stages_a_rank=1, micro_batches=3)


def test_too_much_in_memory_is_told() -> None:
    with pytest.raises(ProgramError, match="rank 0 keeps 5 micro-batches in memory; the schedule allows 2"):
        check_schedule(SCHEDULES["gpipe"](2, 1, 5), stages_a_rank=1, micro_batches=5, in_flight=2)
