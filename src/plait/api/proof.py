"""Prove that a plan computes what one process computes.

In: a job, a plan. Out: a `Verification`.
"""

from contextlib import nullcontext
from pathlib import Path

from plait.api.inputs.given import given_job
from plait.job.job import Job
from plait.options import Changes, Listener
from plait.plan.plan import Plan
from plait.run import verify as proving
from plait.run.start.party import told_once
from plait.run.verify import Verification


def verify(
    job: Job | str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    changes: Changes = Changes(),
    steps: int = 3,
    fp32: bool = False,
    serial: bool = False,
    device: str = "cpu",
    emulate: str | None = None,
    listener: Listener | None = None,
) -> Verification:
    """Run `steps` steps both ways and compare loss, gradients, weights and buffers.

    Without a plan it is ddp, or what the axes of a mesh say; a named plan without `ranks` is run on 2. `serial` runs
    all ranks in this process, `fp32` compares in float32 instead of float64, `emulate` is as in `Trial`.
    """
    with nullcontext() if serial else told_once():
        given, of_plan = given_job(job, changes)
        return proving.verify(
            given, plan, ranks, mesh=changes.mesh, settings=of_plan, steps=steps, fp32=fp32, serial=serial,
            device=device, emulate=emulate, listener=listener,
        )  # fmt: skip
