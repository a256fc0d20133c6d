"""What is computed while a processor has work with collectives, one after the other."""

from plait.program.cost.held import held_up
from plait.program.instructions import Collective, Compute, Wait


def test_computation_holds_up_the_work_of_what_is_under_way_in_its_order() -> None:
    instructions = (
        Compute(id=0, name="before", kind="backward", segment="a"),
        Collective(id=1, name="first", op="all_reduce", axis="data"),
        Compute(id=2, name="beside", kind="backward", segment="a"),
        Collective(id=3, name="second", op="all_reduce", axis="data"),
        Compute(id=4, name="beside both", kind="backward", segment="b"),
        Wait(id=5, name="wait", of=1),
        Compute(id=6, name="beside the second", kind="backward", segment="a"),
        Wait(id=7, name="wait", of=3),
        Compute(id=8, name="after", kind="backward", segment="b"),
    )
    works = {"first": 3.0, "second": 8.0}
    seconds = {"a": 2.0, "b": 4.0}
    found = held_up(instructions, lambda entry: works[entry.name], lambda entry: seconds[entry.segment])
    assert found == {1: 3.0, 3: 5.0}  # 2 + 1 of the first one's 3; 3 + 2 of the second one's 8
