"""What the simulator expects of a run with a straggler, from the trace of the same run without one.

In: a job, a plan, the folder of a run in which nobody was slowed, who is to be slowed. Out: samples a second. What a
rank does between instructions (loading, finding the program, writing down) is taken from the trace as well.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch

import plait
from plait.job.order import micro_batch_sizes, shares
from plait.plan.plan import Plan
from plait.program.averaging import due, longest_round, mixes
from plait.program.instructions import Compute, Instruction, Load, Opaque
from plait.program.program import Program
from plait.program.simulate.rounds import round_durations, slowed, steps_per_s
from plait.program.simulate.served import predicted_throughput
from plait.program.simulate.simulator import Duration, measured_durations, simulate
from plait.run.prepare.prepare import prepare
from plait.trace.files import read_trace
from plait.trace.span import Span, Trace

_STEPS = 40
_ROUNDS = 16
_COMPUTES = ("forward", "backward")


def predicted_samples_per_s(
    job: plait.Job, plan: Plan, folder: Path, slow: Mapping[int, float]
) -> float | None:
    """Samples a second with stragglers; None where a plan has no prediction."""
    trace = read_trace(folder)
    program = _program(job, plan)
    rule = plan.sync.rule
    if rule == "all-reduce":
        return job.batch / _step_s(program, _slowed(trace, program, slow))
    if plan.sync.has_servers:
        durations = measured_durations(trace, program)
        return job.batch * predicted_throughput(program, durations, slow=slow)
    own_s = [_own_step_s(trace, rank, slow.get(rank, 1.0)) for rank in range(plan.mesh.size)]
    if rule == "hogwild":
        return sum(job.batch / plan.mesh.size / seconds for seconds in own_s)
    if mixes(plan):
        steps = _round(job, plan)
        durations = slowed(round_durations(trace, steps), slow)
        return job.batch * steps_per_s(simulate(steps, durations, steps=_ROUNDS * len(steps)), plan.mesh.size)
    return None


def _program(job: plait.Job, plan: Plan) -> Program:
    programs = prepare(job, plan, "cpu", torch.float32, lambda event: None)
    return programs.for_sizes([shares(size, plan.data_ranks) for size in micro_batch_sizes(job.batch, 1)])


def _round(job: plait.Job, plan: Plan) -> list[Program]:
    """The programs of the steps from one average, or exchange, to the next."""
    programs = prepare(job, plan, "cpu", torch.float32, lambda event: None)
    sizes = [shares(size, plan.data_ranks) for size in micro_batch_sizes(job.batch, 1)]
    first = plan.average.warmup
    return [
        programs.for_sizes(sizes, due(plan, first + step, False)) for step in range(longest_round(plan) or 1)
    ]


def _slowed(trace: Trace, program: Program, slow: Mapping[int, float]) -> Duration:
    """Measured durations; a straggler computes for longer, and the first instruction has what lies between others."""
    measured = measured_durations(trace, program)
    between_s = {rank: _between_s(trace, rank) for rank in trace.ranks}

    def duration(rank: int, instruction: Instruction) -> float:
        factor = slow.get(rank, 1.0) if isinstance(instruction, Compute | Opaque) else 1.0
        rest_s = between_s[rank] if isinstance(instruction, Load) and instruction.micro_batch == 0 else 0.0
        return factor * measured(rank, instruction) + rest_s

    return duration


def _step_s(program: Program, duration: Duration) -> float:
    """Of the later ones of many steps."""
    trace = simulate(program, duration, steps=_STEPS)
    ends = [max(s.end_s for s in trace.spans if s.step == step) for step in (_STEPS // 2, _STEPS - 1)]
    return (ends[1] - ends[0]) / (_STEPS - 1 - _STEPS // 2)


def _own_step_s(trace: Trace, rank: int, factor: float) -> float:
    """What a rank does itself in a step of its own: not the waits for others, which come on top."""
    steps = _steps(trace, rank)
    own_s = [
        sum(s.duration_s for s in spans if s.kind not in ("wait", "evaluate", "checkpoint"))
        for spans in steps
    ]
    computed_s = [sum(s.duration_s for s in spans if s.kind in _COMPUTES) for spans in steps]
    return median(own_s) + _between_s(trace, rank, beside=False) + (factor - 1) * median(computed_s)


def _between_s(trace: Trace, rank: int, *, beside: bool = True) -> float:
    """Time of a step in which no instruction runs; `beside`: loading and looking for programs count as such."""
    steps = _steps(trace, rank)
    return median(_gap_s(spans, beside) for spans in steps)


def _gap_s(spans: list[Span], beside: bool) -> float:
    first = spans[0].start_s
    counted = [s for s in spans if not (beside and s.instruction >= 900_000_000)]
    return max(0.0, spans[-1].end_s - first - sum(s.duration_s for s in counted))


def _steps(trace: Trace, rank: int) -> list[list[Span]]:
    """The compute lane of a rank, cut where it loads a batch; evaluations and the first steps are left out."""
    line = sorted((s for s in trace.spans if s.rank == rank and s.lane == "compute"), key=lambda s: s.start_s)
    steps: list[list[Span]] = []
    for span in line:
        if span.name == "wait for the loader" or not steps:
            steps.append([])
        steps[-1].append(span)
    plain = [spans for spans in steps if not any(s.kind in ("evaluate", "checkpoint") for s in spans)]
    return [spans for spans in plain if any(s.kind in _COMPUTES for s in spans)][3:]
