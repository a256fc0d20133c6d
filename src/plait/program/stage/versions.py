"""Which weights a micro-batch sees where every micro-batch is an update of its own (PipeDream).

In: the actions of all ranks of a pipeline, or a program. Out: for every micro-batch the version that a stage computes
with (the number of the stage's own updates in it), and what a program makes of it: how old weights are when their
gradients arrive, and how many versions of them are kept. It never writes instructions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.plan.plan import PIPE
from plait.program.instructions import Instruction, Stash, Update
from plait.program.program import Program, RankProgram
from plait.program.stage.schedules.base import Action
from plait.program.value import Value
from plait.units import format_bytes


def version_read(value: Value, updates: int) -> tuple[str, int] | None:
    """(parameter, version) of a value where it is one, after so many updates."""
    if value.kind == "parameter":
        return value.name, updates
    return (value.name, value.part) if value.kind == "stash" else None


def versions(actions: Sequence[Sequence[Action]], coordinate: int, *, vertical_sync: bool) -> tuple[int, ...]:
    """The version that each micro-batch sees on the stage at `coordinate` of `pipe`, in both directions.

    It is the newest at its forward; with `vertical_sync` on every stage the one that the first stage has at its entry
    (Narayanan et al. 2019, section 3.3).
    """
    return _newest(actions[0 if vertical_sync else coordinate])


def _newest(own: Sequence[Action]) -> tuple[int, ...]:
    found: dict[int, int] = {}
    updates = 0
    for action in own:
        if action.kind == "forward":
            found[action.micro_batch] = updates
        else:
            updates += 1
    return tuple(found[number] for number in sorted(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageVersions:
    """What a stage keeps of older weights in one step, measured on its program."""

    stage: int
    staleness: int
    """Most updates of the stage between the weights that a gradient was computed on and those that it changes."""
    stashes: int
    """Most older versions that were kept at once."""
    num_bytes: int
    """Most bytes of them at once, on one rank."""


def stage_versions(program: Program) -> tuple[StageVersions, ...]:
    """By stage; the ranks of a stage keep the same."""
    mesh = program.plan.mesh
    ranks = {mesh.coordinate(rank, PIPE): rank for rank in reversed(range(mesh.size))}
    return tuple(_measure(stage, program.of(rank)) for stage, rank in sorted(ranks.items()))


def first_reads(entry: RankProgram) -> Mapping[int, tuple[int, Instruction]]:
    """The version that each micro-batch reads first, which is in its forward, and where."""
    trained = {name for bucket in entry.buckets for name in bucket.parameters}
    found: dict[int, tuple[int, Instruction]] = {}
    updates = 0
    for instruction in entry.instructions:
        if isinstance(instruction, Update):
            updates += 1
        elif instruction.micro_batch is not None and not isinstance(instruction, Stash):
            for name in instruction.reads:
                read = version_read(name, updates)
                if read is not None and read[0] in trained:
                    found.setdefault(instruction.micro_batch, (read[1], instruction))
    return found


def _measure(stage: int, entry: RankProgram) -> StageVersions:
    seen = first_reads(entry)
    alive: dict[Value, int] = {}
    updates = staleness = stashes = most_bytes = 0
    for instruction in entry.instructions:
        if isinstance(instruction, Update):
            if instruction.micro_batch is not None and instruction.micro_batch in seen:
                staleness = max(staleness, updates - seen[instruction.micro_batch][0])
            updates += 1
        if isinstance(instruction, Stash) and instruction.version is not None:
            alive |= {name: entry.values[name].num_bytes for name in instruction.writes}
            stashes = max(stashes, len({value.part for value in alive}))
            most_bytes = max(most_bytes, sum(alive.values()))
        for name in instruction.frees:
            alive.pop(name, None)
    return StageVersions(stage=stage, staleness=staleness, stashes=stashes, num_bytes=most_bytes)


def notices_of(program: Program) -> tuple[str, ...]:
    """What a person should know before a run without flushes."""
    found = stage_versions(program)
    number = len(program.micro_batches)
    old = ", ".join(f"stage {entry.stage} up to {entry.staleness}" for entry in found)
    kept = ", ".join(
        f"stage {entry.stage} {entry.stashes} ({format_bytes(entry.num_bytes)} a rank)" for entry in found
    )
    return (
        f"each of the {number} micro-batches of a step is an update of its own, without a flush; learning rates change "
        "once a step.",
        f"gradients are computed on weights that are some updates old: {old}.",
        f"older versions of weights that are kept for that, at most: {kept}.",
    )
