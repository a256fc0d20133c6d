"""What a simulated trace says about a training step.

In: a program and its trace of several steps. Out: the time of a step once steps follow each other, and
where ranks wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.plan.mesh import Mesh
from plait.program.instructions import (
    Collective,
    Exchange,
    Instruction,
    Push,
    PushBuffers,
    Recv,
    Send,
    Wait,
)
from plait.program.program import Program
from plait.trace.span import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One step, of all ranks."""

    step_s: float
    """From the end of the step before to its own end."""
    bubble: float
    """Mean share of it for which ranks wait for other stages, from 0 to 1."""
    exposed_s: float
    """Mean time for which ranks wait for collectives or servers, or do their part of them."""
    sent_bytes: Mapping[str, float]
    """Bytes that a rank sends, by axis, or to `servers`: the most of any rank."""


def step_times(program: Program | Sequence[Program], trace: Trace, last: int = 1) -> StepTimes:
    """Read the last steps of a trace; `last`: how many, of which the mean counts."""
    programs = [program] if isinstance(program, Program) else program
    workers = programs[0].plan.mesh.size
    ends: dict[int, float] = {}
    for span in trace.spans:
        if span.rank < workers:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end_s)
    final = max(ends)
    start_s = ends.get(final - last, 0.0)
    step_s = (ends[final] - start_s) / last
    pipeline = {
        i.name
        for entry in programs[0].classes
        for i in entry.instructions
        if isinstance(i, Wait) and isinstance(entry.instructions[i.of], Recv)
    }
    stages_s, others_s = 0.0, 0.0
    ends_of: dict[int, float] = {}
    for span in trace.spans:
        if span.rank >= workers or span.step <= final - last:
            continue
        if span.lane == "compute":
            ends_of[span.rank] = max(ends_of.get(span.rank, 0.0), span.end_s)
        if span.kind == "wait":
            inside_s = max(0.0, span.end_s - max(span.start_s, start_s))
            if span.name in pipeline:
                stages_s += inside_s
            else:
                others_s += inside_s
    if programs[0].plan.agreement.marches:
        stages_s += sum(ends[final] - end_s for end_s in ends_of.values())
    num_ranks = sum(rank < workers for rank in trace.ranks)
    return StepTimes(
        step_s=step_s,
        bubble=stages_s / num_ranks / last / step_s if step_s else 0.0,
        exposed_s=others_s / num_ranks / last,
        sent_bytes=_sent_bytes(programs, [rank for rank in trace.ranks if rank < workers]),
    )


def _sent_bytes(programs: Sequence[Program], ranks: Sequence[int]) -> dict[str, float]:
    """The most that a rank sends in a step, by axis or to `servers`; of a round, the mean of its steps."""
    mesh = programs[0].plan.mesh
    most: dict[str, float] = {}
    for rank in ranks:
        own: dict[str, float] = {}
        for program in programs:
            for instruction in program.of(rank).instructions:
                axis, sent = _sent(instruction, mesh)
                if sent:
                    own[axis] = own.get(axis, 0.0) + sent / len(programs)
        most = {axis: max(most.get(axis, 0.0), own.get(axis, 0.0)) for axis in {*most, *own}}
    return most


def _sent(instruction: Instruction, mesh: Mesh) -> tuple[str, float]:
    if isinstance(instruction, Push | PushBuffers):
        return "servers", instruction.num_bytes
    if isinstance(instruction, Exchange):
        return "servers", instruction.num_bytes / 2  # the other half comes back
    if isinstance(instruction, Send):
        return instruction.axis, instruction.num_bytes
    if isinstance(instruction, Collective) and (size := mesh.size_of(instruction.axis)) > 1:
        if instruction.op == "broadcast":
            return instruction.axis, (size - 1) * instruction.num_bytes if instruction.reads else 0.0
        if instruction.op == "reduce":
            return instruction.axis, 0.0 if instruction.writes else instruction.num_bytes
        times = 2.0 if instruction.op == "all_reduce" else 1.0
        part = 1.0 if instruction.op.startswith("halo") else (size - 1) / size
        return instruction.axis, times * part * instruction.num_bytes
    return "", 0.0
