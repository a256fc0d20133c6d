"""`plait graph`: what one training step computes and costs, and where its tensors are under a plan.

In: a job's reference and what to make of it. Out: tables on the console, JSON on standard output, or a page; the exit
code. Nothing of the model is allocated, and nothing is trained.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

import plait
from plait.cli.console import plain_console, prints_aside, waiting
from plait.cli.flatten import flattened
from plait.cli.options import TEXTS, How, JobArgument, JsonOption, look_first
from plait.errors import CaptureError, DiskError, UsageError
from plait.files.write import write_named
from plait.options import Changes


@flattened(TEXTS)
def graph(
    job: JobArgument,
    *,
    batch: Annotated[
        int | None, typer.Option(help="Samples to capture with; the job's own micro-batch by default.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Draw it as a page that opens offline.")] = None,
    placements: Annotated[
        bool,
        typer.Option("--placements", help="Show where every tensor is under a plan, and what is exchanged."),
    ] = False,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Compare it with a cheaper equal graph, found by rules."),
    ] = False,
    how: How,
    changes: Changes,
    json_: JsonOption = False,
) -> None:
    """Show what one training step of JOB computes: parameters, ops, FLOPs, memory, the costliest modules.

    With --placements: where its tensors are under a plan, and what ranks exchange. With --rewrite: a cheaper graph.
    """
    if placements and rewrite:
        raise UsageError("--placements and --rewrite show different things.", fix="give one of them.")
    if not placements and (how != How() or changes.mesh or changes.settings):
        raise UsageError(
            "--plan, --ranks, --mesh and --set say how a step is run.", fix="add --placements to see it."
        )
    look_first(job, how, changes)
    progress = plain_console(
        to_stderr=json_
    )  # a machine reads standard output; what is going on is for a person
    try:
        with prints_aside(json_), waiting(progress, f"Reading {job}"):
            if placements:
                found = _placed(job, batch, how, changes)
            else:
                found = (_rewritten if rewrite else _captured)(job, batch, changes.args)
    except CaptureError as error:
        _refuse(error, job, json_, progress)
        raise typer.Exit(1) from error
    values, view, page = found
    if html is not None:
        _write_page(html, page(f"plait graph {job}{' --placements' if placements else ''}"))
    if json_:
        print(json.dumps({"job": job, **values()}))
    else:
        progress.print(view)
    if html is not None:
        progress.print(Text(f"Wrote {html}", style="green"))


def _captured(job: str, batch: int | None, args: Mapping[str, Any]) -> tuple[Any, RenderableType, Any]:
    from plait.api.graphs import captured
    from plait.cli.views.graph import summary_values, summary_view  # torch takes seconds: help does not wait
    from plait.graph.show.draw import draw_html
    from plait.graph.show.summary import summarize, to_json

    graph, verdict = captured(job, batch=batch, args=args)
    summary = summarize(graph)
    view = Group(summary_view(job, graph, summary), Text(), Text(verdict.line()))
    return (
        lambda: to_json(graph) | {"summary": summary_values(summary), "verdict": asdict(verdict)},
        view,
        lambda title: draw_html(graph, title),
    )


def _rewritten(job: str, batch: int | None, args: Mapping[str, Any]) -> tuple[Any, RenderableType, Any]:
    from plait.cli.views.rewritten import rewritten_page, rewritten_view  # likewise

    found = plait.rewritten(job, batch=batch, args=args)
    values = {
        "before": asdict(found.before),
        "after": asdict(found.after),
        "rules": found.rules,
        "told": found.line,
    }
    return (
        lambda: values,
        Group(Text(job, style="bold"), *rewritten_view(found)),
        lambda title: rewritten_page(found, f"{title} --rewrite"),
    )


def _placed(job: str, batch: int | None, how: How, changes: Changes) -> tuple[Any, RenderableType, Any]:
    from plait.cli.views.placements import listing_view  # likewise
    from plait.report.placements_page import placements_page

    placed = plait.placements(job, how.plan, how.ranks, changes=changes, batch=batch)
    listing, notices = placed.listing, placed.notices
    view = Group(Text(job, style="bold"), *listing_view(listing, notices))
    return (
        lambda: {"notices": notices, **asdict(listing)},
        view,
        lambda title: placements_page(listing, notices, title),
    )


def _write_page(path: Path, page: str) -> None:
    """Write the page whole or not at all."""
    try:
        write_named(path, page)
    except DiskError as error:
        raise UsageError(error.what, fix="name a file that you may write.") from error


def _refuse(error: CaptureError, job: str, json_: bool, console: Console) -> None:
    """Say why there is no graph, with the line that stopped it."""
    if json_:
        print(json.dumps({"job": job, "error": error.what, "where": error.where, "fix": error.fix}))
    where = f"  at {error.where}" if error.where and error.where not in error.what else ""
    console.print(Text.assemble(("dynamic: ", "bold red"), f"{error.what}{where}"))
    if error.fix:
        console.print(Text.assemble(("Fix: ", "bold"), error.fix))
