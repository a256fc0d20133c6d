"""The options of `plait plan`, as typer takes them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from plait.cli.options import parse_settings
from plait.cli.plan_command import Planning, plan_command
from plait.errors import UsageError
from plait.search.export import EXPORTERS


def plan_(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="path.py[:function] or module:function.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]", help="A model on paper instead: gpt3-175b, gpt:layers=24,..."
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="8xA100, 64x8xH100, a YAML file, or `this` after plait measure.")
    ] = "this",
    ranks: Annotated[int | None, typer.Option(help="Devices to use; all of the cluster by default.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device that may be used: 70GiB.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step, over all devices.")] = None,
    price: Annotated[float | None, typer.Option(help="Money for one device and hour.")] = None,
    top: Annotated[int, typer.Option(help="Plans to show.")] = 10,
    seconds: Annotated[float, typer.Option(help="Time limit of the search.")] = 60.0,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Rank the forms of this named plan alone.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why the first plan beats the second.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the first plan to this file.")] = None,
    export: Annotated[
        str | None, typer.Option(help=f"Write it for another system: {', '.join(EXPORTERS)}.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="A scaling table over these numbers of devices.")
    ] = None,
    same_batch: Annotated[
        bool, typer.Option("--same-batch", help="With --scale: one batch for all, not one a device.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="With --scale: draw it to this file.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the job: batch=128.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Rank the plans for JOB on a cluster: step time, memory, money; what does not fit, and why."""
    job_settings, plan_settings = parse_settings(set_ or [])
    if plan_settings:
        raise UsageError(
            f"--set {', '.join(plan_settings)} belongs to a plan, which is what is searched for.",
            fix="set the job alone, or use plait predict.",
        )
    if (svg is not None or same_batch) and scale is None:
        raise UsageError("--svg and --same-batch belong to a scaling table.", fix="add --scale 1,2,4,8.")
    asked = Planning(
        job=job, model=model, cluster=cluster, ranks=ranks, memory=memory, batch=batch, price=price, top=top,
        seconds=seconds, named=plan, explain=explain, json=json_, out=out, export=export, scale=scale,
        same_batch=same_batch, svg=svg, job_settings=job_settings,
    )  # fmt: skip
    raise typer.Exit(plan_command(asked, Console()))
