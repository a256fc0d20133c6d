"""`plait try`: a job with several arguments, side by side, on folds of its data.

In: options. Out: a line for every run that ends, a table with the best first, and the command that trains it; or JSON.
The exit code is 1 where all trials failed.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import plait
from plait.cli.console import plain_console, prints_aside
from plait.cli.flatten import flattened
from plait.cli.options import (
    TEXTS,
    DeviceOption,
    How,
    JobArgument,
    JsonOption,
    look_first,
)
from plait.cli.run_command import InterruptedRunError
from plait.errors import UsageError
from plait.options import Changes, Elsewhere, Tries

_TRIED = replace(
    TEXTS["args"],
    metavar="NAME=VALUES",
    help="Of the job's function: lr=1e-4,3e-4, width=64:256, wd=1e-5:0.1:log.",
)
"""Several values of an argument."""


@flattened({**TEXTS, "args": _TRIED})
def try_(
    job: JobArgument,
    *,
    changes: Changes,
    tries: Tries,
    how: How,
    steps: Annotated[int | None, typer.Option(help="Stop each run after this many optimizer steps.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the try; tries/NAME-SUM by default. The same command goes on in it."),
    ] = None,
    device: DeviceOption = "cpu",
    elsewhere: Elsewhere,
    json_: JsonOption = False,
) -> None:
    """Train JOB with several arguments, side by side, and tell which are best, with their spread over folds."""
    told = plain_console(to_stderr=json_, lasting=True)
    if not changes.args:
        raise UsageError("there is nothing to try.", fix="say what: --arg lr=1e-4,3e-4,1e-3.")
    look_first(job, how, changes)

    def say(event: dict[str, Any]) -> None:
        told.print(event["told"], highlight=False, soft_wrap=True, markup=False)

    with prints_aside(json_), _told_how_to_go_on():
        tuned = plait.tune(
            job, how.plan, how.ranks, changes=changes, tries=tries, steps=steps, out=out, device=device,
            elsewhere=elsewhere, listener=say,
        )  # fmt: skip
    if json_:
        _print_json(tuned)
    else:
        _print_table(tuned)
    raise typer.Exit(0 if tuned.best is not None else 1)


@contextmanager
def _told_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptedRunError("interrupted, and what ran was saved; the same command goes on.") from error


def _print_json(tuned: "plait.Tuned") -> None:
    rows = [
        asdict(row) | {"mean": row.mean if row.scores else None, "spread": row.spread} for row in tuned.tried
    ]
    print(
        json.dumps(
            {"folder": str(tuned.folder), "metric": tuned.metric, "tried": rows, "command": tuned.command}
        )
    )


def _print_table(tuned: "plait.Tuned") -> None:
    from plait.api.tune import table  # torch takes seconds: help does not wait for it

    console, view = plain_console(), Table()
    heads, rows = table(tuned)
    for head in heads:
        view.add_column(head)
    for row in rows:
        view.add_row(*(Text(cell) for cell in row))
    console.print(view)
    if tuned.command is not None:
        console.print("to train the best on all of the data:", highlight=False)
        console.print(Text(tuned.command, style="bold"), soft_wrap=True)
    console.print(Text(f"{tuned.folder}/try.html"), soft_wrap=True)
