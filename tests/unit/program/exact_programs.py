"""Compiled programs of small cases on any mesh, with durations of a cluster: for tests of exact predictions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tests.zoo import ZOO

import plait
from plait.cluster.cluster import Cluster
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.program.cost.durations import Durations
from plait.program.cost.update import update_work
from plait.program.program import Program
from plait.run.prepare.programs import Programs


def job_of(name: str, batch: int, accumulate: int, optimizer: str = "adamw") -> Job:
    """A case of the zoo."""
    return replace(ZOO[name].job(batch=batch, optimizer=optimizer), accumulate=accumulate)


def compiled(
    name: str,
    plan: str,
    mesh: Mapping[str, int],
    batch: int,
    accumulate: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Program:
    """A step of the case under the plan."""
    return _compiled(name, plan, tuple(mesh.items()), batch, accumulate, repr(settings or {}))


@cache
def _compiled(
    name: str, plan: str, mesh: tuple[tuple[str, int], ...], batch: int, accumulate: int, settings: str
) -> Program:
    chosen = plait.resolve(plan, None, eval(settings), dict(mesh))
    job = job_of(name, batch, accumulate)
    programs = Programs(job, open_data(job.data, job.collate), chosen, torch.device("cpu"))
    return programs.for_sizes(job.step_shares(None, chosen.data_ranks))


def durations_of(program: Program, cluster: Cluster) -> Durations:
    """With AdamW as the optimizer."""
    build = job_of("mlp", 4, 1).build_optimizer
    first = [program.members.index(entry) for entry in range(len(program.classes))]
    return Durations(program, cluster, {e: update_work(program, rank, build) for e, rank in enumerate(first)})
