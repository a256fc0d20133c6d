"""Ranks that share processors, worked out by hand: durations are of ranks that all work at once."""

import pytest
from tests.unit.program.simulate.test_simulate import (
    DURATIONS,
    ONE_BY_ONE,
    OVERLAPPED,
    compute,
    program_of,
    reduce,
    times,
    wait,
)

from plait.program.instructions import Instruction, Recv, Send
from plait.program.simulate.simulator import simulate
from plait.trace.span import Trace


def shared(
    ranks: "list[tuple[Instruction, ...]]", seconds: "list[dict[str, float]]", processors: int | None
) -> Trace:
    return simulate(
        program_of(*ranks), lambda rank, instruction: seconds[rank][instruction.name], processors=processors
    )


@pytest.mark.parametrize("own", [OVERLAPPED, ONE_BY_ONE])
@pytest.mark.parametrize("processors", [1, 2, 3])
def test_ranks_that_all_do_the_same_take_what_they_take_together(
    own: tuple[Instruction, ...], processors: int
) -> None:
    alike = shared([own] * 3, [DURATIONS] * 3, None)
    found = shared([own] * 3, [DURATIONS] * 3, processors)
    assert [times(found, rank) for rank in range(3)] == [times(alike, rank) for rank in range(3)]


def test_who_computes_while_others_wait_is_quicker() -> None:
    """Three ranks on two processors: all at once each has two thirds of one, so alone, or with one other, a rank takes
    two thirds of the time."""
    own = (compute("work", 0), reduce(0, 1), wait(2, 1))
    found = shared([own] * 3, [{"work": work, "reduce 0": 1.0} for work in (3.0, 6.0, 12.0)], 2)
    assert times(found, 0)["work"] == (0, 3)
    assert times(found, 1)["work"] == (0, 5)  # 3 together, the other 3 at one and a half times the speed
    assert times(found, 2)["work"] == pytest.approx(
        (0, 9)
    )  # 3 together, 9 at that speed: two or one, it has one
    assert times(found, 2)["reduce 0"] == pytest.approx((9, 10))


def test_of_stages_that_wait_for_each_other_one_is_at_work() -> None:
    sends = (
        compute("work", 0),
        Send(id=1, name="send", kind="communication", axis="data", to=1, message="m"),
        compute("later", 2),
    )
    receives = (
        Recv(id=0, name="receive", kind="communication", axis="data", source=0, message="m"),
        wait(1, 0),
        compute("work", 2),
    )
    seconds = {"work": 4.0, "send": 1.0, "later": 0.0}
    found = shared([sends, receives], [seconds] * 2, 1)
    assert times(found, 0)["work"] == (0, 2)
    assert times(found, 1)["wait for 0"] == (0, 3) and times(found, 1)["work"] == (3, 5)
    seconds["later"] = 4.0  # from 3 to 5 both are at work
    found = shared([sends, receives], [seconds] * 2, 1)
    assert times(found, 0)["later"] == (2, 5)  # 1 alone does half of it, the rest is beside the other
    assert times(found, 1)["work"] == (3, 6)


def test_starting_and_ending_communication_needs_a_processor_too() -> None:
    own = (reduce(0, 0), wait(1, 0))
    late = (compute("work", 0), reduce(0, 1), wait(2, 1))

    def simulated(processors: int | None) -> Trace:
        return simulate(
            program_of(own, late), lambda rank, instruction: {"work": 3.0, "reduce 0": 1.0}[instruction.name],
            at_start=lambda rank, started: 1.0, own_part=lambda rank, started: 2.0, processors=processors,
        )  # fmt: skip

    assert times(simulated(None), 1)["reduce 0"] == (4, 5)
    assert times(simulated(1), 1)["work"] == (0, 2)  # 1 beside the start of the other, 2 alone
    assert times(simulated(1), 1)["reduce 0"] == (2.5, 3.5)
    assert times(simulated(1), 0)["wait for 0"] == (1, 5.5)
