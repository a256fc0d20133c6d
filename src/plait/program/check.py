"""Prove that a program is sound before anything runs.

In: a `Program`. Out: nothing, or a `ProgramError` that names the instructions at fault. Checked: every value is written
before it is read and freed once; every collective is awaited exactly once, before its result is read; all ranks of an
axis start the same collectives in the same order; every gradient of a summed bucket is summed exactly once.
"""

from collections.abc import Sequence

from plait.errors import ProgramError
from plait.plan.plan import DATA
from plait.program.instructions import Accumulate, Collective, Instruction, Keep, Update, Wait
from plait.program.program import Program, RankProgram

_GIVEN = ("buffer:", "constant:", "chunk:")


def check_program(program: Program) -> None:
    """Raise where the program could deadlock, read what is not there, or miss a sum."""
    given = _GIVEN if program.layout.groups else (*_GIVEN, "parameter:")
    for entry in program.classes:
        _check_values(entry, given)
        _check_waits(entry)
        _check_sums(program, entry)
    reference: Sequence[tuple[object, ...]] | None = None
    for index, entry in enumerate(program.classes):
        order = [_what(c) for c in _collectives(entry)]
        if reference is None:
            reference = order
        elif order != reference:
            place = next(
                (i for i, (a, b) in enumerate(zip(reference, order, strict=False)) if a != b),
                min(len(reference), len(order)),
            )
            raise ProgramError(
                f"ranks of class 0 and class {index} do not start the same collectives: number {place} is "
                f"{_at(reference, place)} on one and {_at(order, place)} on the other."
            )


def _what(collective: Collective) -> tuple[object, ...]:
    """What ranks with other samples must agree on; along other axes than `data` they never meet, so sizes may differ."""
    sizes: tuple[object, ...] = ()
    if DATA in collective.axis.split("+"):
        sizes = (collective.extents, collective.num_bytes if collective.op == "all_reduce" else 0)
    return (collective.op, collective.axis, *sizes, collective.name)


def _at(order: Sequence[tuple[object, ...]], place: int) -> str:
    return str(order[place]) if place < len(order) else "nothing"


def _collectives(entry: RankProgram) -> list[Collective]:
    return [instruction for instruction in entry.instructions if isinstance(instruction, Collective)]


def _check_values(entry: RankProgram, always: tuple[str, ...]) -> None:
    alive: dict[str, Instruction] = {}
    freed: dict[str, Instruction] = {}
    for instruction in entry.instructions:
        for name in instruction.reads:
            if name in freed:
                raise ProgramError(
                    f"instruction {instruction.id} ({instruction.name}) reads {name}, which instruction "
                    f"{freed[name].id} ({freed[name].name}) has freed."
                )
            given = name.startswith(always) or name in entry.constants or "/offset:" in name
            if name not in alive and not given:
                raise ProgramError(
                    f"instruction {instruction.id} ({instruction.name}) reads {name} before it is written."
                )
        for name in instruction.writes:
            alive[name] = instruction
            freed.pop(name, None)
        for name in instruction.frees:
            if name in freed:
                raise ProgramError(
                    f"{name} is freed by instruction {freed[name].id} and again by {instruction.id}."
                )
            freed[name] = instruction
            alive.pop(name, None)


def _check_waits(entry: RankProgram) -> None:
    open_: dict[int, Collective] = {}
    pending: dict[str, Collective] = {}
    for instruction in entry.instructions:
        if isinstance(instruction, Wait):
            if instruction.of not in open_:
                raise ProgramError(
                    f"instruction {instruction.id} ({instruction.name}) waits for {instruction.of}, "
                    "which is not under way."
                )
            started = open_.pop(instruction.of)
            for name in started.writes:
                pending.pop(name, None)
            continue
        for name in (*instruction.reads, *instruction.writes):
            if name in pending:
                raise ProgramError(
                    f"instruction {instruction.id} ({instruction.name}) uses {name} while instruction "
                    f"{pending[name].id} ({pending[name].name}) is still communicating it."
                )
        if isinstance(instruction, Collective):
            open_[instruction.id] = instruction
            for name in instruction.writes:
                pending[name] = instruction
    if open_:
        first = next(iter(open_.values()))
        raise ProgramError(f"instruction {first.id} ({first.name}) is never awaited.")


def _check_sums(program: Program, entry: RankProgram) -> None:
    updates = [i.id for i in entry.instructions if isinstance(i, Update)]
    for index, bucket in enumerate(program.buckets):
        name = f"bucket:{index}"
        filled = [i for i in entry.instructions if isinstance(i, Accumulate) and i.bucket == index]
        sums = [i for i in entry.instructions if isinstance(i, Collective) and i.reads == (name,)]
        each = bucket.group is not None and program.layout.zero >= 2
        fresh = [True] * len(filled) if each else [True] + [False] * (len(filled) - 1)
        if not filled or [i.fresh for i in filled] != fresh:
            raise ProgramError(
                f"{name} is not filled afresh {'each time' if each else 'once and then added to'}."
            )
        wanted = len(filled) if each else 1 if bucket.axis is not None else 0
        if len(sums) != wanted:
            raise ProgramError(f"{name} is summed {len(sums)} times over {bucket.axis}; it must be {wanted}.")
        if sums and not filled[-1].id < sums[-1].id < updates[0]:
            raise ProgramError(
                f"{name} is summed by instruction {sums[-1].id}, not between its last gradient and the update."
            )
        if bucket.group is not None:
            _check_kept(entry, index, wanted, updates[0])


def _check_kept(entry: RankProgram, index: int, wanted: int, update: int) -> None:
    kept = [i for i in entry.instructions if isinstance(i, Keep) and i.bucket == index]
    if len(kept) != wanted or [i.fresh for i in kept] != [True] + [False] * (wanted - 1):
        raise ProgramError(
            f"shard:{index} is kept {len(kept)} times, once afresh; it must be {wanted} times."
        )
    if kept[-1].id > update:
        raise ProgramError(f"shard:{index} is kept by instruction {kept[-1].id}, after the update.")
