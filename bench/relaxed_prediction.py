"""What the simulator expects of a run with a straggler, from the trace of the same run without one.

In: a job, a plan, the folder of a run in which nobody was slowed, who is to be slowed. Out: samples a second. What a
rank does between instructions (loading, finding the program, writing down) is taken from the trace as well.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

import plait
from bench.measured import measured_durations, slowed, steps_per_s
from plait.plan.plan import Plan
from plait.program.simulate.simulator import simulate
from plait.run.prepare.prepare import prepare
from plait.trace.files import read_trace

_STEPS = 48


def predicted_samples_per_s(job: plait.Job, plan: Plan, folder: Path, slow: Mapping[int, float]) -> float:
    """Samples a second with stragglers."""
    steps = prepare(job, plan, "cpu", torch.float32, lambda event: None).round()
    measured = measured_durations(read_trace(folder), steps)
    count = -(-_STEPS // len(steps)) * len(steps)
    trace = simulate(steps, slowed(measured.duration, slow), steps=count, own_part=measured.own_part)
    return job.batch * steps_per_s(trace, plan.mesh.size)
