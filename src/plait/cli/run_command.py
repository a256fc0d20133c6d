"""`plait run`: train a job, show how it goes, leave a run folder.

In: options. Out: a live display, or JSON; the exit code is 1 where the run was interrupted.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import plait
from plait.api.stored import stored_saving, stored_settings
from plait.cli.flatten import flattened
from plait.cli.options import TEXTS, How, JsonOption
from plait.cli.progress import show_progress
from plait.errors import PlaitError, UsageError
from plait.files.write import write_or_tell
from plait.options import Limits, Listener, Saving, Trial


class FailedRunError(Exception):
    """An error of a run that had started: whatever its kind, it is no bad usage."""

    def __init__(self, error: PlaitError) -> None:
        super().__init__(str(error))
        self.error = error


@flattened(TEXTS)
def run(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="path.py[:function] or module:function; not needed with --resume."
        ),
    ] = None,
    *,
    how: How,
    steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME-TIME by default.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu (the default) or cuda.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this folder, on any number of ranks.")
    ] = None,
    trace: Annotated[bool, typer.Option(help="Record every instruction of every rank.")] = True,
    json_: JsonOption = False,
    saving: Saving,
    limits: Limits,
    trial: Trial,
    given: frozenset[str],
) -> None:
    """Train JOB and leave a run folder with its plan, metrics, trace and checkpoints."""
    told = Console(stderr=json_)
    with show_progress(told, quiet=json_) as listener, _failing_after_start(listener, told) as heard:
        options: dict[str, Any] = {
            "plan": how.plan, "ranks": how.ranks, "mesh": how.mesh, "settings": how.settings, "steps": steps,
            "out": out, "trace": trace, "listener": heard, "limits": limits, "trial": trial,
        }  # fmt: skip
        if resume is not None:
            own = {name: getattr(saving, name) for name in given & {"checkpoint_every", "record_samples"}}
            kept = replace(stored_saving(stored_settings(resume)), **own)
            result = plait.resume(resume, job=job, device=device, saving=kept, **options)
        elif job is not None:
            result = plait.train(job, device=device or "cpu", saving=saving, **options)
        else:
            raise UsageError("no job was given.", fix="name it: plait run path.py --plan ddp --ranks 2.")
    if trace:
        write_or_tell(
            lambda: plait.write_page(result.folder), lambda text: print(f"notice: {text}", file=sys.stderr)
        )
    if json_:
        summary = {
            "folder": str(result.folder), "losses": result.losses, "evaluation": dict(result.evaluation),
            "stopped": result.stopped, "notices": list(result.notices),
        }  # fmt: skip
        print(json.dumps(summary))
    else:
        if result.stopped not in (None, "interrupted"):
            told.print(f"stopped: {result.stopped}", highlight=False, soft_wrap=True)
        where = f"run folder: [bold]{result.folder}[/bold]  (plait report {result.folder})"
        told.print(where, highlight=False, soft_wrap=True)
    if result.stopped == "interrupted":
        print(f"interrupted and saved; to go on: plait run --resume {result.folder}", file=sys.stderr)
        raise typer.Exit(1)


@contextmanager
def _failing_after_start(listener: Listener, console: Console) -> Iterator[Listener]:
    """The listener; once it was told that training started, errors are those of a failed run."""
    started = False

    def heard(event: dict[str, Any]) -> None:
        nonlocal started
        started = started or "started" in event
        if "told" in event:
            console.print(event["told"], highlight=False, soft_wrap=True)
        listener(event)

    try:
        yield heard
    except PlaitError as error:
        if started:
            raise FailedRunError(error) from error
        raise
