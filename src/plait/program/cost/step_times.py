"""What a simulated trace says about a training step.

In: a program and its trace of several steps. Out: the time of a step once steps follow each other, and
where ranks wait.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.program.instructions import Collective, Recv, Send, Wait
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
    """Mean time for which ranks wait for collectives, or do their part of them."""
    sent_bytes: Mapping[str, float]
    """Bytes that a rank sends, by axis: the most of any rank."""


def step_times(program: Program, trace: Trace) -> StepTimes:
    """Read the last step of the trace."""
    last = max(span.step for span in trace.spans)
    ends = {
        step: max(s.end_s for s in trace.spans if s.step == step) for step in (last - 1, last) if step >= 0
    }
    start_s = ends.get(last - 1, 0.0)
    step_s = ends[last] - start_s
    stages_s, collectives_s = 0.0, 0.0
    ends_of: dict[int, float] = {}
    for span in trace.spans:
        if span.step != last:
            continue
        instruction = program.of(span.rank).instructions[span.instruction]
        if span.lane == "compute":
            ends_of[span.rank] = max(ends_of.get(span.rank, 0.0), span.end_s)
        if isinstance(instruction, Wait):
            waited_for = program.of(span.rank).instructions[instruction.of]
            inside_s = max(0.0, span.end_s - max(span.start_s, start_s))
            if isinstance(waited_for, Recv):
                stages_s += inside_s
            else:
                collectives_s += inside_s
    stages_s += sum(ends[last] - end_s for end_s in ends_of.values())
    num_ranks = len(trace.ranks)
    return StepTimes(
        step_s=step_s,
        bubble=stages_s / num_ranks / step_s if step_s else 0.0,
        exposed_s=collectives_s / num_ranks,
        sent_bytes=_sent_bytes(program, trace.ranks),
    )


def _sent_bytes(program: Program, ranks: tuple[int, ...]) -> dict[str, float]:
    mesh = program.plan.mesh
    most: dict[str, float] = {}
    for rank in ranks:
        own: dict[str, float] = {}
        for instruction in program.of(rank).instructions:
            if isinstance(instruction, Send):
                own[instruction.axis] = own.get(instruction.axis, 0.0) + instruction.num_bytes
            elif isinstance(instruction, Collective):
                size = mesh.size_of(instruction.axis)
                times = {"all_reduce": 2.0, "halo": 1.0, "halo_add": 1.0}.get(instruction.op, 1.0)
                part = 1.0 if instruction.op.startswith("halo") else (size - 1) / size
                if size > 1:
                    own[instruction.axis] = (
                        own.get(instruction.axis, 0.0) + times * part * instruction.num_bytes
                    )
        most = {axis: max(most.get(axis, 0.0), own.get(axis, 0.0)) for axis in {*most, *own}}
    return most
