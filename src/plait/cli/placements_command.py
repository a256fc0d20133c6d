"""`plait graph --placements`: where every tensor of a step is under a plan, and what ranks exchange.

In: a job's reference, a plan and what to make of it. Out: tables on the console, JSON on standard output, or a page;
the exit code. The model is captured and compiled; nothing is trained, and no process is started.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.text import Text

from plait.cli.graph_command import refused, write_page
from plait.cli.options import job_with
from plait.cli.placements_view import listing_view
from plait.errors import CaptureError, UsageError
from plait.graph.graph import Graph
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.job.order import shares
from plait.job.reference import load_job
from plait.plan.named import resolve
from plait.plan.plan import PIPE, Plan
from plait.program.show.listing import Listing
from plait.program.show.show import list_placements
from plait.report.placements_page import placements_page
from plait.run.prepare.programs import Programs


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the command line says about the plan."""

    plan: str | None
    ranks: int | None
    mesh: Mapping[str, int] | None
    job_settings: Mapping[str, Any]
    plan_settings: Mapping[str, Any]


def placements_command(
    job_reference: str,
    asked: Asked,
    *,
    batch: int | None,
    json_output: bool,
    html: Path | None,
    console: Console,
) -> int:
    """Compile the job's step under the plan and show its placements."""
    if batch is not None and batch < 1:
        raise UsageError(f"--batch {batch} is no number of samples.", fix="give 1 or more.")
    progress = Console(stderr=True) if json_output else console
    plan = resolve(asked.plan, asked.ranks, asked.plan_settings, asked.mesh)
    if plan.num_stages > 1:
        raise UsageError(
            f"--placements shows cuts within operators; pipe={plan.mesh.size_of(PIPE)} cuts between them.",
            fix="leave pipe out of the mesh; `plait report` shows the timeline of a pipeline that ran.",
        )
    try:
        with progress.status(f"Reading {job_reference}") as status:
            job = job_with(load_job(job_reference), asked.job_settings)
            status.update(f"Compiling a step for {plan.mesh.size} ranks")
            listing, notices = listing_of(job, plan, batch)
    except CaptureError as error:
        return refused(error, job_reference, json_output, progress)
    if html is not None:
        write_page(html, placements_page(listing, notices, f"plait graph {job_reference} --placements"))
    if json_output:
        json.dump({"job": job_reference, "notices": notices, **asdict(listing)}, sys.stdout)
        sys.stdout.write("\n")
    else:
        console.print(Group(Text(job_reference, style="bold"), *listing_view(listing, notices)))
    if html is not None:
        progress.print(Text(f"Wrote {html}", style="green"))
    return 0


def listing_of(job: Job, plan: Plan, batch: int | None = None) -> tuple[Listing, tuple[str, ...]]:
    """What a step of the job looks like under a plan, and how open choices were made.

    `batch` is the number of samples of its one micro-batch; None: the step is that of the job.
    """
    source = open_data(job.data, job.collate)
    programs = Programs(job, source, plan, torch.device("cpu"))
    if batch is not None:
        program = programs.for_sizes([shares(batch, plan.data_ranks)])
    else:
        program = programs.for_sizes(job.step_shares(source.num_samples, plan.data_ranks))
    if programs.capture_error is not None:
        raise programs.capture_error
    graph: Graph = programs.captures.of_size(program.micro_batches[0])
    local = job.batch_norm == "local"
    listing = list_placements(graph, programs.plan, program, local_batch_norm=local)
    return listing, (*programs.choices, *program.notices)
