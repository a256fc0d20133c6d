"""`plait plan`: which plan, how fast, does it fit, and why.

In: what a person asked for on the command line. Out: tables or JSON, a plan file, the configuration of another system.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import plait
from plait.api.inputs.settings import parse_arguments, parse_settings
from plait.cli.console import plain_console, prints_aside, speaks_elsewhere
from plait.cli.engine import COMMAND_LINE, start
from plait.cli.flatten import flattened
from plait.cli.options import (
    TEXTS,
    ArgOption,
    DryRunOption,
    How,
    JsonOption,
    look_first,
    parse_counts,
)
from plait.errors import PlanError, UsageError
from plait.options import SYSTEMS, Elsewhere, Search

if TYPE_CHECKING:
    from plait.search.choose.scaling import Scaled


@flattened({"engine_set": TEXTS["engine_set"]})
def plan_(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="path.py[:function] or module:function.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]", help="A model on paper instead: gpt3-175b, gpt:layers=24,..."
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="8xA100, 64x8xH100, a YAML file, or `this` after plait measure.")
    ] = "this",
    batch: Annotated[int | None, typer.Option(help="Samples a step, over all devices.")] = None,
    search: Search,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why the first plan beats the second.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the first plan to this file.")] = None,
    export: Annotated[
        str | None, typer.Option(help=f"Write it for another system: {', '.join(SYSTEMS)}.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="A scaling table over these numbers of devices.")
    ] = None,
    same_batch: Annotated[
        bool,
        typer.Option("--same-batch", help="With --scale: one batch for all, not one a device."),
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="With --scale: draw it to this file.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the job: batch=128.")
    ] = None,
    arg: ArgOption = None,
    elsewhere: Elsewhere,
    dry_run: DryRunOption = False,
    json_: JsonOption = False,
) -> None:
    """Rank the plans for JOB on a cluster: step time, memory, money; what does not fit, and why.

    Started by an engine, `this` is the hosts that it found, whose links are measured first.
    """
    if elsewhere.engine is not None:
        raise typer.Exit(
            start(elsewhere, search.ranks, COMMAND_LINE, dry_run=dry_run, name="plan", out=None, runs=False)
        )
    look_first(job, How(plan=search.plan))
    if (svg is not None or same_batch) and scale is None:
        raise UsageError("--svg and --same-batch belong to a scaling table.", fix="add --scale 1,2,4,8.")
    if export is not None and export not in SYSTEMS:
        raise UsageError(f"--export {export!r} is not known.", fix=f"use one of {', '.join(SYSTEMS)}.")
    what: dict[str, Any] = {
        "job": job, "model": model, "cluster": cluster, "batch": batch, "settings": parse_settings(set_ or []),
        "args": parse_arguments(arg or ()), "search": search,
    }  # fmt: skip
    if scale is not None:
        with prints_aside(json_):
            rows = plait.scale(parse_counts(scale), same_batch=same_batch, **what)
        if speaks_elsewhere():
            return
        _show_scaling(rows, job or str(model), cluster, same_batch, json_, svg)
        return
    with prints_aside(json_):
        choice = plait.choose(**what)
    if speaks_elsewhere():
        return
    written = []
    if export is not None:
        written += plait.export_plan(choice, export, out)
    elif out is not None:
        out.write_text(choice.to_yaml())
        named = job and " ".join([job, *(f"--arg {entry}" for entry in arg or ())])
        written.append(f"wrote {out}: {choice.to_use(out, named, cluster)}")
    _show(choice, written, explain, json_)


def _show_scaling(
    rows: "Sequence[Scaled]", name: str, cluster: str, same_batch: bool, json_: bool, svg: Path | None
) -> None:
    from plait.cli.views.plan import (  # torch takes seconds: help does not wait for it
        scaling_json,
        scaling_view,
    )
    from plait.report.scaling_picture import scaling_picture

    console = plain_console()
    title = f"{name} on {cluster}: {'one batch' if same_batch else 'batch grows with devices'}"
    if json_:
        print(json.dumps(scaling_json(rows)))
    else:
        console.print(scaling_view(title, rows))
    if svg is None:
        return
    points = [(row.ranks, row.prediction.samples_per_s) for row in rows if row.prediction is not None]
    if not points:
        raise PlanError("no number of devices has a plan that fits.", fix="use more devices or less batch.")
    svg.write_text(scaling_picture(title, points))
    if not json_:
        console.print(f"wrote {svg}")


def _show(choice: "plait.Choice", written: list[str], explain: bool, json_: bool) -> None:
    from plait.cli.views.plan import ranking_json, ranking_view  # likewise

    console = plain_console()
    best = choice.best
    if json_:
        said = ranking_json(choice.ranking) | {"explained": choice.why, "written": written}
        print(json.dumps(said))
        return
    title = f"{choice.subject.name}  batch {best.batch} on {best.cluster.name}"
    console.print(ranking_view(title, choice.ranking, best.limit_bytes))
    if explain:
        console.print(Text("Why the first", "bold"))
        for line in choice.why:
            console.print(Text(line), soft_wrap=True)
    for line in written:
        console.print(Text(line), soft_wrap=True)
