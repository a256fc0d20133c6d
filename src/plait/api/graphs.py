"""What one training step computes, and where its tensors are under a plan.

In: a job, a plan. Out: a `Graph`, or a `Listing` of placements and exchanges. Nothing is trained, nothing allocated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plait.api.inputs.given import given_job
from plait.cluster.parse import THIS, measured_path, parse_cluster
from plait.errors import CaptureError, UsageError
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.verdict import Verdict as Verdict
from plait.graph.verdict import verdict_against, verdict_of
from plait.job.data.open import open_data
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.order import shares
from plait.options import Changes
from plait.plan.named import resolve, usual_ranks
from plait.plan.plan import PIPE, Plan
from plait.program.hops.price import Network, choices_of
from plait.program.show.listing import Listing
from plait.program.show.show import list_placements
from plait.rewrite.choose import preset_like
from plait.rewrite.rewrite import GraphCosts, graph_costs, rewrite
from plait.run.measure.graph_times import time_graphs
from plait.run.prepare.programs import Programs


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A step under a plan."""

    listing: Listing
    """Where every tensor is, and what ranks exchange."""
    notices: tuple[str, ...]
    """How open choices of the plan were made, and what else a person should know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewrittenGraph:
    """A graph before and after rewriting."""

    before: GraphCosts
    """As it was captured."""
    after: GraphCosts
    """As it was rewritten."""
    captured: Graph
    """The one before."""
    graph: Graph
    """The rewritten one."""
    line: str
    """What became of it, in words."""
    rules: tuple[str, ...]
    """That the rewritten graph is made by."""


@kept_generators()
def capture(job: Job | str, *, batch: int | None = None, args: Mapping[str, Any] | None = None) -> Graph:
    """The dataflow graph of one micro-step of `batch` samples; those of the job's own micro-batch by default.

    Raises `CaptureError`, with the line, where the model cannot be captured.
    """
    _check_batch(batch)
    given, _ = given_job(job, Changes(args=args or {}))
    return Captures(given).of_size(batch if batch is not None else -(-given.batch // given.accumulate))


@kept_generators()
def verdict(job: Job | str, *, batch: int | None = None, args: Mapping[str, Any] | None = None) -> Verdict:
    """Whether one graph serves every step of a job: static, static for each shape, in parts, or dynamic and why."""
    _check_batch(batch)
    given, _ = given_job(job, Changes(args=args or {}))
    return verdict_of(Captures(given), batch if batch is not None else -(-given.batch // given.accumulate))


@kept_generators()
def captured(
    job: Job | str, *, batch: int | None = None, args: Mapping[str, Any] | None = None
) -> tuple[Graph, Verdict]:
    """Both of a job that is captured once."""
    _check_batch(batch)
    given, _ = given_job(job, Changes(args=args or {}))
    captures, size = Captures(given), batch if batch is not None else -(-given.batch // given.accumulate)
    try:
        return captures.of_size(size), verdict_of(captures, size)
    except CaptureError as error:
        found = verdict_against(captures, error)
        if found.why == error.what:
            raise
        raise CaptureError(found.why, fix=found.fix, where=found.where or None) from error


@kept_generators()
def rewritten(
    job: Job | str,
    *,
    batch: int | None = None,
    args: Mapping[str, Any] | None = None,
) -> RewrittenGraph:
    """The graph of `capture` and a cheaper equal one, with what both cost: predicted, and timed on this processor."""
    _check_batch(batch)
    given, _ = given_job(job, Changes(args=args or {}))
    before = Captures(given).of_size(batch if batch is not None else -(-given.batch // given.accumulate))
    made = rewrite(before, preset_like(torch.device("cpu")).device)
    seconds = time_graphs([before, made.graph])
    return RewrittenGraph(
        before=graph_costs(before, made.before_s, seconds[0]),
        after=graph_costs(made.graph, made.after_s, seconds[1]),
        captured=before,
        graph=made.graph,
        line=made.line(),
        rules=tuple(made.rules),
    )


@kept_generators()
def placements(
    job: Job | str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    changes: Changes = Changes(),
    batch: int | None = None,
) -> Placed:
    """Where every tensor of a step is under a plan, and what ranks exchange; `batch` as for `capture`."""
    _check_batch(batch)
    ranks = ranks if ranks is not None or changes.mesh else usual_ranks(plan)
    given, of_plan = given_job(job, changes)
    chosen = replace(
        resolve(plan, ranks, of_plan, changes.mesh), rewrite="off"
    )  # the user's own ops are shown
    if chosen.num_stages > 1:
        raise UsageError(
            f"--placements shows cuts within operators; pipe={chosen.mesh.size_of(PIPE)} cuts between them.",
            fix="leave pipe out of the mesh; `plait report` shows the timeline of a pipeline that ran.",
        )
    programs = Programs(given, open_data(given.data, given.collate), chosen, torch.device("cpu"))
    own = programs.full_shares() if batch is None else [shares(batch, chosen.data_ranks)]
    program = programs.for_sizes(own)
    if programs.capture_error is not None:
        raise programs.capture_error
    graph = programs.captures.of_size(program.micro_batches[0])
    listing = list_placements(graph, programs.plan, program, local_batch_norm=given.batch_norm == "local")
    machine = parse_cluster(THIS) if measured_path().exists() else parse_cluster(f"{chosen.mesh.size}xcpu")
    told = choices_of(program, Network.of(machine, chosen.mesh.size))
    return Placed(listing=listing, notices=(*programs.choices, *program.notices, *told))


def _check_batch(batch: int | None) -> None:
    if batch is not None and batch < 1:
        raise UsageError(f"--batch {batch} is no number of samples.", fix="give 1 or more.")
