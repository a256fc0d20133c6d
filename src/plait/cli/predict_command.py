"""`plait predict` and `plait measure`: what a step will cost, and what this machine can do.

In: a job's reference, a plan, a cluster. Out: numbers on the console or as JSON; the exit code is 1 where the plan does
not fit. Without a cluster it is this machine: as `plait measure` found it, else measured shortly.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import plait
from plait.api.display.progress import show_progress
from plait.cli.console import plain_console, prints_aside, speaks_elsewhere, waiting
from plait.cli.engine import COMMAND_LINE, start
from plait.cli.flatten import flattened
from plait.cli.options import (
    TEXTS,
    DeviceOption,
    DryRunOption,
    EmulateOption,
    How,
    JobArgument,
    JsonOption,
    look_first,
)
from plait.cluster.parse import HOSTS_FILE, measured_path
from plait.options import Changes, Elsewhere


@flattened(TEXTS)
def predict(
    job: JobArgument,
    *,
    how: How,
    changes: Changes,
    cluster: Annotated[
        str | None,
        typer.Option(help="8xA100, 64x8xH100, a YAML file; this machine by default, measured if need be."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device that may be used: 70GiB.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the predicted timeline, for Perfetto or chrome://tracing.")
    ] = None,
    device: DeviceOption = "cpu",
    emulate: EmulateOption = None,
    json_: JsonOption = False,
) -> None:
    """Predict a training step of JOB under a plan on a cluster: time, utilization, waiting, memory.

    A plan without --ranks or --mesh is predicted on the whole of --cluster.
    """
    look_first(job, how, changes)
    with prints_aside(json_), waiting(plain_console(to_stderr=json_), f"reading {job}") as say:
        found = plait.predict(
            job, how.plan, how.ranks, changes=changes,
            cluster=cluster, memory=memory, device=device, emulate=emulate, listener=lambda event: say(event["stage"]),
        )  # fmt: skip
    from plait.cli.views.predict import print_prediction  # torch takes seconds: help does not wait for it
    from plait.trace.files import write_chrome

    if trace is not None:
        write_chrome(found.trace, trace)
    if json_:
        print(json.dumps(found.prediction.as_json() | {"job": job, "notices": list(found.notices)}))
    else:
        print_prediction(found, plain_console())
    raise typer.Exit(0 if found.prediction.fits else 1)


@flattened(TEXTS)
def measure(
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The YAML file to write; where `--cluster this` looks by default, of several hosts hosts.yaml."
        ),
    ] = None,
    device: DeviceOption = "cpu",
    elsewhere: Elsewhere,
    dry_run: DryRunOption = False,
    json_: JsonOption = False,
) -> None:
    """Measure this machine: rates, memory, links, start-up; about ten seconds. Under an engine, links of hosts too."""
    if elsewhere.engine is not None:
        raise typer.Exit(start(elsewhere, None, COMMAND_LINE, dry_run=dry_run, name="measure", runs=False))
    is_silent = speaks_elsewhere()
    with show_progress(plain_console(to_stderr=json_), quiet=json_ or is_silent) as listener:
        measured = plait.measure(device, out=out, listener=listener)
    if is_silent:
        return
    several = measured.cluster.hosts > 1
    path = out or (HOSTS_FILE if several else measured_path())
    if json_:
        said = {"file": str(path), "cluster": asdict(measured.cluster), "measured": measured.notes}
        print(json.dumps(said))
        return
    from plait.cli.views.predict import print_measured  # likewise

    console = plain_console()
    print_measured(measured, console)
    use = "this" if out is None and not several else path
    console.print(f"wrote {path}: use it with --cluster {use}", highlight=False, soft_wrap=True)
