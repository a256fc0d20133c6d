"""The checker finds faults that are planted in sound programs, and names the instructions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.program.compiled import program_of, with_instructions

from plait.errors import ProgramError
from plait.program.check.messages import check_meetings
from plait.program.check.soundness import check_program
from plait.program.instructions import Accumulate, Collective, Finish, Instruction, Load, Update, Wait
from plait.program.program import Program
from plait.program.value import WEIGHT

Plant = Callable[[list[Instruction]], list[Instruction]]


def sound(accumulate: int = 1) -> Program:
    """Two ranks with 4 and 3 samples, each gradient in a bucket of its own."""
    return program_of("mlp", 2, (7,) if accumulate == 1 else (4, 3), bucket_mib=0.0)


def find(instructions: list[Instruction], kind: type, name: str = "") -> Any:
    return next(i for i in instructions if isinstance(i, kind) and name in i.name)


def says(plant: Plant, *parts: str, of_class: int = 0, accumulate: int = 1) -> None:
    program = sound(accumulate)
    planted = with_instructions(program, plant(list(program.classes[of_class].instructions)), of_class)
    with pytest.raises(ProgramError) as raised:
        check_program(planted)
    for part in parts:
        assert part in raised.value.what


def text(instruction: Instruction) -> str:
    return f"{instruction.id} ({instruction.name})"


def test_compiled_programs_are_sound() -> None:
    for accumulate in (1, 2):
        check_program(sound(accumulate))


def test_a_value_that_is_read_before_it_is_written() -> None:
    instructions = list(sound().classes[0].instructions)
    load = find(instructions, Load)
    first = next(i for i in instructions if set(i.reads) & set(load.writes))
    says(
        lambda given: [i for i in given if i.id != load.id],
        f"instruction {text(first)} reads 0/batch",
        "before it is written",
    )


def test_a_value_that_is_used_while_it_travels() -> None:
    instructions = list(sound().classes[0].instructions)
    wait, sent = find(instructions, Wait, "bucket:0"), find(instructions, Collective, "bucket:0")
    finish = find(instructions, Finish)

    def plant(given: list[Instruction]) -> list[Instruction]:
        return [*(i for i in given if i.id != wait.id), wait]

    says(
        plant,
        f"instruction {text(finish)} uses bucket:0 while instruction {text(sent)} is still communicating",
    )


def test_a_collective_that_nobody_awaits() -> None:
    last = find(list(sound().classes[0].instructions), Update)
    extra = Collective(
        id=last.id + 1, name="all_reduce weight", kind="communication", op="all_reduce", axis="data",
        reads=(WEIGHT,), writes=(WEIGHT,),
    )  # fmt: skip
    says(lambda given: [*given, extra], f"instruction {text(extra)} is never awaited")


def test_a_wait_for_nothing() -> None:
    wait = find(list(sound().classes[0].instructions), Wait, "bucket:0")
    again = replace(wait, id=900)
    says(
        lambda given: _after(given, wait, again),
        f"instruction {text(again)} waits for {wait.of}, which is not under way",
    )


def _after(given: list[Instruction], place: Instruction, new: Instruction) -> list[Instruction]:
    index = next(i for i, entry in enumerate(given) if entry.id == place.id)
    return [*given[: index + 1], new, *given[index + 1 :]]


def test_a_value_that_is_freed_twice() -> None:
    instructions = list(sound().classes[0].instructions)
    frees = next(i for i in instructions if i.frees)
    update = find(instructions, Update)

    def plant(given: list[Instruction]) -> list[Instruction]:
        return [replace(i, frees=(frees.frees[0],)) if i.id == update.id else i for i in given]

    says(
        plant, f"{frees.frees[0]} is freed by instruction {frees.id}", f"again by instruction {text(update)}"
    )


def test_a_value_that_is_read_after_it_was_freed() -> None:
    instructions = list(sound().classes[0].instructions)
    frees = next(i for i in instructions if i.frees)
    update = find(instructions, Update)

    def plant(given: list[Instruction]) -> list[Instruction]:
        return [replace(i, reads=(frees.frees[0],)) if i.id == update.id else i for i in given]

    says(
        plant, f"instruction {text(update)} reads {frees.frees[0]}, which instruction {text(frees)} has freed"
    )


def test_ranks_that_start_their_collectives_in_another_order() -> None:
    """Buckets 0 and 1 travel in another order on the ranks of class 1: each would wait for the other."""
    program = sound()
    assert len(program.classes) == 2

    def plant(given: list[Instruction]) -> list[Instruction]:
        late, other = find(given, Collective, "bucket:0"), find(given, Collective, "bucket:1")
        wait = find(given, Wait, "bucket:0")
        moved = [i for i in given if i.id not in (late.id, wait.id)]
        moved = _after(moved, other, replace(late, id=other.id + 1))
        return _after(moved, find(moved, Wait, "bucket:1"), replace(wait, of=other.id + 1))

    says(plant, "class 0 and class 1", "all_reduce bucket:0", "all_reduce bucket:1", of_class=1)


@pytest.mark.parametrize("of_class", [0, 1])
def test_ranks_that_start_fewer_collectives(of_class: int) -> None:
    program = sound()
    given = list(program.classes[of_class].instructions)
    last = [i for i in given if isinstance(i, Collective)][-1]
    planted = with_instructions(program, [i for i in given if i is not last], of_class)
    with pytest.raises(ProgramError, match="do not start the same collectives over data: number") as raised:
        check_meetings(planted)
    assert last.name in raised.value.what and "nothing" in raised.value.what


def test_a_bucket_that_is_never_summed() -> None:
    says(
        lambda given: [i for i in given if "bucket:1" not in i.name],
        "bucket:1 is summed 0 times over data; it must be 1",
    )


def test_a_bucket_that_is_summed_twice() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        wait = find(given, Wait, "bucket:1")
        sent = find(given, Collective, "bucket:1")
        again = _after(given, wait, replace(sent, id=901))
        return _after(again, again[[i.id for i in again].index(901)], replace(wait, id=902, of=901))

    says(plant, "bucket:1 is summed 2 times over data; it must be 1")


def test_a_bucket_that_is_summed_before_its_last_gradient() -> None:
    instructions = list(sound(2).classes[0].instructions)
    sent, wait = find(instructions, Collective, "bucket:0"), find(instructions, Wait, "bucket:0")
    first = find(instructions, Accumulate, "bucket 0")

    def plant(given: list[Instruction]) -> list[Instruction]:
        rest = [i for i in given if i.id not in (sent.id, wait.id)]
        early = replace(sent, id=-1)
        return _after(_after(rest, first, early), early, replace(wait, of=early.id))

    with pytest.raises(ProgramError, match="bucket:0 is summed by instruction"):
        check_program(with_instructions(sound(2), plant(instructions)))


def test_a_bucket_that_is_not_filled_afresh() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        first = find(given, Accumulate, "bucket 0")
        return [replace(i, fresh=False) if i is first else i for i in given]

    says(plant, "bucket:0 is not filled afresh once")
