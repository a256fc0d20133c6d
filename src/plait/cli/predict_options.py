"""The options of `plait predict` and `plait measure`, as typer takes them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from plait.cli.measure_command import measure_command
from plait.cli.options import parse_mesh, parse_settings
from plait.cli.predict_command import Asked, predict_command

_Device = Annotated[str, typer.Option("--device", help="Of this machine: cpu or cuda.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def predict_(
    job: Annotated[str, typer.Argument(metavar="JOB", help="path.py[:function] or module:function.")],
    plan: Annotated[str | None, typer.Option("--plan", help="A plan's name or a .yaml file.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="8xA100, 64x8xH100, a YAML file; this machine by default, measured if need be."),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="Number of processes.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="AXIS=N,...", help="Ranks along each axis: data=2,tensor=2."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device that may be used: 70GiB.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the job (batch=128) or the plan."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the predicted timeline, for Perfetto or chrome://tracing.")
    ] = None,
    device: _Device = "cpu",
    json_: _Json = False,
) -> None:
    """Predict a training step of JOB under a plan on a cluster: time, utilization, waiting, memory."""
    job_settings, plan_settings = parse_settings(set_ or [])
    asked = Asked(
        plan=plan, ranks=ranks, mesh=parse_mesh(mesh), cluster=cluster, memory=memory, device=device, trace=trace,
        job_settings=job_settings, plan_settings=plan_settings,
    )  # fmt: skip
    raise typer.Exit(predict_command(job, asked, json_output=json_, console=Console()))


def measure_(
    out: Annotated[
        Path | None, typer.Option(help="The YAML file to write; where `--cluster this` looks by default.")
    ] = None,
    device: _Device = "cpu",
    json_: _Json = False,
) -> None:
    """Measure this machine: rates, memory, links, start-up; about ten seconds."""
    raise typer.Exit(measure_command(out, device, json_output=json_, console=Console()))
