"""`plait run`: train a job, show how it goes, leave a run folder.

In: options. Out: a live display, or JSON; the exit code is 130 where the run was interrupted.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import plait
from plait.api.display.loggers import loggers
from plait.api.display.progress import show_progress
from plait.api.inputs.stored import SAVED
from plait.callbacks import Watching
from plait.cli.console import plain_console, prints_aside, speaks_elsewhere
from plait.cli.engine import COMMAND_LINE, check_here, start
from plait.cli.flatten import flattened
from plait.cli.options import (
    TEXTS,
    DeviceName,
    DryRunOption,
    How,
    JsonOption,
    Reading,
    look_first,
    num_ranks,
)
from plait.errors import CheckpointError, PlaitError, UsageError
from plait.files.unused import check_there, check_unused
from plait.files.write import write_or_tell
from plait.options import Changes, Elsewhere, Limits, Listener, Saving, Trial
from plait.run.join.find import find_place, task_of


class FailedRunError(Exception):
    """An error of a run that had started: whatever its kind, it is no bad usage."""

    def __init__(self, error: PlaitError) -> None:
        super().__init__(str(error))
        self.error = error


class InterruptedRunError(Exception):
    """Somebody wanted the run to end; says what is left of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Going:
    """How far it goes, and where."""

    steps: int | None = None
    """Stop after this many optimizer steps."""
    out: Path | None = None
    """The run folder; runs/NAME-TIME by default."""
    device: DeviceName | None = None
    """Of this machine; cpu by default."""
    resume: Path | None = None
    """Continue the run in this folder, on any number of ranks."""


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
    changes: Changes,
    going: _Going,
    reading: Reading,
    elsewhere: Elsewhere,
    dry_run: DryRunOption = False,
    json_: JsonOption = False,
    saving: Saving,
    limits: Limits,
    trial: Trial,
    given: frozenset[str],
) -> None:
    """Train JOB and leave a run folder with its plan, metrics, trace and checkpoints."""
    out, resume = going.out, going.resume
    if elsewhere.engine is not None:
        name, ranks = Path((job or str(resume)).split(":")[0]).stem, num_ranks(how, changes)
        raise typer.Exit(start(elsewhere, ranks, COMMAND_LINE, dry_run=dry_run, name=name, out=out or resume))
    check_here(elsewhere, dry_run=dry_run)
    look_first(job, *((how, changes) if resume is None else (How(), Changes())), auto=True)
    begins_again = limits.elastic is not None and task_of(os.environ) is not None
    if out is not None and resume is None and find_place(os.environ) is None and not begins_again:
        check_unused(out)  # of tasks started side by side the first looks, once they have met
    if resume is not None and find_place(os.environ) is None:
        check_there(resume)
    loggers(saving.log)
    told, is_silent = plain_console(to_stderr=json_, lasting=True), speaks_elsewhere()
    with (
        prints_aside(json_),
        show_progress(told, quiet=json_ or is_silent) as listener,
        _failing_after_start(listener, told) as heard,
    ):
        options: dict[str, Any] = {
            "plan": how.plan, "ranks": how.ranks, "steps": going.steps, "out": out, "limits": limits, "trial": trial,
            "changes": replace(changes, settings={**changes.settings, **reading.settings}),
            "watching": Watching(listener=heard),
        }  # fmt: skip
        if resume is not None:
            own = {name: getattr(saving, name) for name in given & {*SAVED, "trace"}}
            result = plait.resume(resume, job=job, device=going.device, saving=own, **options)
        elif job is not None:
            result = plait.train(job, device=going.device or "cpu", saving=saving, **options)
        else:
            raise UsageError("no job was given.", fix="name it: plait run path.py --plan ddp --ranks 2.")
    if not is_silent:
        if saving.trace:
            write_or_tell(
                lambda: plait.write_page(result.folder),
                lambda text: print(f"notice: {text}", file=sys.stderr),
            )
        _show(result, told, json_)
    if result.stopped == "interrupted":
        left = f"interrupted and saved; to go on: plait run --resume {result.folder}"
        raise InterruptedRunError("" if is_silent else left)


def _show(result: "plait.Result", told: Console, json_: bool) -> None:
    """What a run has come to, for a person or a program."""
    if json_:
        summary = {
            "folder": str(result.folder), "losses": result.losses, "evaluation": dict(result.evaluation),
            "stopped": result.stopped, "notices": list(result.notices),
        }  # fmt: skip
        print(json.dumps(summary))
        return
    if result.stopped not in (None, "interrupted"):
        told.print(f"stopped: {result.stopped}", highlight=False, soft_wrap=True)
    folder = str(result.folder)
    page = f"; {folder}/report.html" if (result.folder / "report.html").exists() else ""
    where = Text.assemble("run folder: ", (folder, "bold"), f"  (plait report {folder}{page})")
    told.print(where, soft_wrap=True)


@contextmanager
def _failing_after_start(listener: Listener, console: Console) -> Iterator[Listener]:
    """The listener; once it was told that training started, errors are those of a failed run."""
    started: str | None = None

    def heard(event: dict[str, Any]) -> None:
        nonlocal started
        started = event.get("started", started)
        if "told" in event and not speaks_elsewhere():
            console.print(event["told"], highlight=False, soft_wrap=True)
        listener(event)

    try:
        yield heard
    except PlaitError as error:
        if started is not None:
            raise FailedRunError(error) from error
        raise
    except KeyboardInterrupt as error:
        raise InterruptedRunError(_left_behind(started)) from error


def _left_behind(folder: str | None) -> str:
    if folder is None:
        return "interrupted before training began: nothing was saved."
    from plait.run.checkpoint.store import locate_checkpoint  # torch takes seconds: help does not wait for it

    try:
        last = locate_checkpoint(Path(folder), on_notice=lambda text: None)
    except CheckpointError:
        return f"interrupted and ended at once: nothing was saved in {folder}."
    return (
        f"interrupted and ended at once: nothing was saved after {last.name};"
        f" to go on from there: plait run --resume {folder}"
    )
