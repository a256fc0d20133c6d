"""The simulator: interprets a program by advancing clocks.

In: a program and how long each instruction takes. Out: a `Trace` of the same kind as a measured one. A rank's
lanes are queues: an instruction starts when its lane is free and what it waits for is done; a collective
starts when every rank of its group has issued it and lasts equally long for all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plait.errors import ProgramError
from plait.program.instructions import Collective, Instruction, Wait
from plait.program.program import Program
from plait.trace.span import Span, Trace

Duration = Callable[[int, Instruction], float]
"""(rank, instruction) -> seconds; for a collective, the time from the last arrival to its end."""


@dataclass(slots=True)
class _Rank:
    """A rank's clocks."""

    position: int = 0
    compute_s: float = 0.0
    communication_s: float = 0.0


@dataclass(slots=True)
class _Meeting:
    """A collective that ranks arrive at."""

    arrived: dict[int, float]
    end_s: float | None = None


def simulate(program: Program, duration: Duration, *, steps: int = 1) -> Trace:
    """Run `steps` steps of all ranks on clocks."""
    mesh = program.plan.mesh
    ranks = [_Rank() for _ in range(mesh.size)]
    spans: list[Span] = []
    for step in range(steps):
        meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        under_way: list[dict[int, _Meeting]] = [{} for _ in ranks]
        counts: list[dict[tuple[int, ...], int]] = [{} for _ in ranks]
        for rank in ranks:
            rank.position = 0
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(ranks):
                instructions = program.of(number).instructions
                while rank.position < len(instructions):
                    instruction = instructions[rank.position]
                    if isinstance(instruction, Wait) and under_way[number][instruction.of].end_s is None:
                        break
                    start, end = rank.compute_s, rank.compute_s
                    if isinstance(instruction, Collective):
                        group = mesh.group(number, instruction.axis)
                        index = counts[number].get(group, 0)
                        counts[number][group] = index + 1
                        meeting = meetings.setdefault((group, index), _Meeting(arrived={}))
                        meeting.arrived[number] = rank.compute_s
                        under_way[number][instruction.id] = meeting
                        if len(meeting.arrived) == len(group):
                            _hold(meeting, ranks, group, program, instruction, duration, step, spans)
                    elif isinstance(instruction, Wait):
                        finished = under_way[number].pop(instruction.of).end_s
                        assert finished is not None
                        end = max(start, finished)
                    else:
                        end = start + duration(number, instruction)
                    if not isinstance(instruction, Collective):
                        spans.append(_span(number, step, instruction, start, end))
                        rank.compute_s = end
                    rank.position += 1
                    moved = True
        stuck = {
            number: program.of(number).instructions[rank.position].name
            for number, rank in enumerate(ranks)
            if rank.position < len(program.of(number).instructions)
        }
        if stuck:
            told = ", ".join(f"rank {number} in {name}" for number, name in stuck.items())
            raise ProgramError(f"the program deadlocks: {told}.")
    metadata: Mapping[str, object] = {"plan": program.plan.name, "mesh": dict(mesh.axes)}
    return Trace(
        spans=tuple(spans), ranks=tuple(range(mesh.size)), source="simulated", metadata=dict(metadata)
    )


def _hold(
    meeting: _Meeting,
    ranks: list[_Rank],
    group: tuple[int, ...],
    program: Program,
    instruction: Collective,
    duration: Duration,
    step: int,
    spans: list[Span],
) -> None:
    """Everybody is there: the collective runs on the communication lanes of the group."""
    start = max(*meeting.arrived.values(), *(ranks[member].communication_s for member in group))
    meeting.end_s = start + duration(group[0], instruction)
    for member in group:
        ranks[member].communication_s = meeting.end_s
        own = next(
            i
            for i in program.of(member).instructions
            if isinstance(i, Collective) and i.name == instruction.name
        )
        spans.append(_span(member, step, own, meeting.arrived[member], meeting.end_s))


def _span(rank: int, step: int, instruction: Instruction, start_s: float, end_s: float) -> Span:
    return Span(
        rank=rank,
        step=step,
        instruction=instruction.id,
        kind=instruction.kind,
        name=instruction.name,
        lane=instruction.lane,
        start_s=start_s,
        end_s=end_s,
        micro_batch=instruction.micro_batch,
        stage=instruction.stage,
        num_bytes=instruction.num_bytes,
    )


def measured_durations(trace: Trace) -> Duration:
    """Mean durations of a measured trace, by rank and instruction.

    Waiting is left to the simulator: a collective counts from its last arrival, or the end of the one before,
    to where the first rank had its result.
    """
    spent: dict[tuple[int, int], list[float]] = {}
    meetings: dict[tuple[int, int], list[Span]] = {}
    for span in trace.spans:
        if span.lane == "communication":
            meetings.setdefault((span.step, span.instruction), []).append(span)
        else:
            spent.setdefault((span.rank, span.instruction), []).append(span.end_s - span.start_s)
    before_s = 0.0
    for (_, number), spans in sorted(
        meetings.items(), key=lambda item: max(span.start_s for span in item[1])
    ):
        end_s = min(span.end_s for span in spans)
        lasted = max(0.0, end_s - max(before_s, *(span.start_s for span in spans)))
        before_s = max(before_s, end_s)
        for span in spans:
            spent.setdefault((span.rank, number), []).append(lasted)
    means = {key: sum(times) / len(times) for key, times in spent.items()}
    return lambda rank, instruction: means.get((rank, instruction.id), 0.0)
