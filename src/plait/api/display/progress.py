"""A live display of training: a bar with loss, speed and time left in a terminal, one line that changes in a notebook,
plain lines elsewhere.

In: events from `train` and `verify`. Out: text on the console. Nothing is shown for the first moments of what
ends quickly.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from plait.options import Listener
from plait.units import format_bytes, format_count, format_seconds

_LINE_EVERY_S = 2.0
"""Between two lines where the output is no terminal: 30 lines a minute can be read."""


@contextmanager
def shown(wanted: bool | None, listener: Listener | None) -> Iterator[Listener | None]:
    """The listener, and beside it a display on the standard error output: where somebody looks, or where it is wanted.

    Who listens themselves is shown nothing unless they ask for it.
    """
    console = LastingConsole(stderr=True, markup=False, emoji=False, highlight=False)
    is_seen = console.is_terminal or console.is_jupyter
    if wanted is False or (wanted is None and (listener is not None or not is_seen)):
        yield listener
        return

    def both(event: dict[str, Any]) -> None:
        display(event)
        if listener is not None:
            listener(event)

    with show_progress(console, quiet=False) as display:
        yield both


@contextmanager
def show_progress(console: Console, *, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A listener for events; the display ends with the block."""
    if quiet:
        yield lambda event: None
        return
    if not console.is_terminal:
        yield _Lines(console, _changing_line() if console.is_jupyter else None)
        return
    with Progress(
        TextColumn("{task.description}", style="bold", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}", markup=False), TimeRemainingColumn(), console=console, transient=False,
    ) as progress:  # fmt: skip
        yield _Bar(progress)


class LastingConsole(Console):
    """What it shows can be done without: silent where nobody can be told any more (a closed pipe, a full disk)."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As a console's."""
        try:
            super().print(*objects, **options)
        except (OSError, ValueError):
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Nothing is shown from here on; what waits to be written goes nowhere."""
        self.quiet = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("preparing", total=None, numbers="")

    def __call__(self, event: dict[str, Any]) -> None:
        for text in _said(event):
            self._progress.console.print(text, highlight=False)
        if "stage" in event:
            self._progress.update(self._task, description=event["stage"], total=None, completed=0)
        if "started" in event:
            done = event.get("start_step", 0)
            self._progress.update(
                self._task, description="training", total=event["total_steps"], completed=done
            )
        metrics = event.get("metrics", {})
        if "loss" in metrics:
            self._progress.update(self._task, completed=metrics["step"] + 1, numbers=_numbers(metrics))


def _changing_line() -> Callable[[str], None]:
    """Shows a text in the cell of a notebook, in the place of the one before."""
    handle: Any = import_module("IPython.display").DisplayHandle()
    is_there = False

    def write(text: str) -> None:
        nonlocal is_there
        (handle.update if is_there else handle.display)({"text/plain": text}, raw=True)
        is_there = True

    return write


class _Lines:
    def __init__(self, console: Console, write_step: Callable[[str], None] | None = None) -> None:
        """`write_step`: shows a line of numbers otherwise than below the one before."""
        self._console = console
        self._write_step = write_step or self._print
        self._last = time.monotonic() - _LINE_EVERY_S
        self._total: int | None = None
        self._start = 0
        self._began = time.monotonic()

    def __call__(self, event: dict[str, Any]) -> None:
        for text in _said(event):
            self._print(text)
        if "stage" in event:
            self._print(event["stage"])
        if "started" in event:
            self._total, self._start = event["total_steps"], event.get("start_step", 0)
            self._began = time.monotonic()
        metrics = event.get("metrics", {})
        if "loss" not in metrics:
            return
        now = time.monotonic()
        last = self._total is not None and metrics["step"] + 1 == self._total
        if now - self._last >= _LINE_EVERY_S or last:
            self._last = now
            of = f"/{self._total}" if self._total else ""
            left = ""
            if self._total and not last:
                per_step_s = (now - self._began) / (metrics["step"] + 1 - self._start)
                left = f"  {format_seconds(per_step_s * (self._total - metrics['step'] - 1))} left"
            self._write_step(f"step {metrics['step'] + 1}{of}  {_numbers(metrics)}{left}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _said(event: dict[str, Any]) -> list[str]:
    """Sentences for a person in an event."""
    said = _about(event["run"]) if "run" in event else []
    said += [f"notice: {text}" for text in event.get("notices", [])]
    if "notice" in event:
        said.append(f"notice: {event['notice']}")
    if event.get("saved", {}).get("deleted"):
        saved = event["saved"]
        said.append(f"checkpoint of step {saved['step']} saved; deleted: {', '.join(saved['deleted'])}")
    if event.get("compiled_s", 0.0) > 2.0:
        said.append(f"captured and compiled in {format_seconds(event['compiled_s'])}")
    measured = event.get("metrics", {}).get("evaluate")
    if measured:
        values = "  ".join(f"{name} {value:.4g}" for name, value in measured.items())
        said.append(f"evaluation after step {event['metrics']['step'] + 1}: {values}")
    return said


def _about(run: dict[str, Any]) -> list[str]:
    """What a run is about to do, in two lines: what is trained and how, on how much and where to."""
    frozen = run["num_parameters"] - run["num_trainable"]
    parameters = format_count(run["num_parameters"]) + " parameters"
    if frozen:
        parameters += f" ({format_count(frozen)} frozen)"
    axes = [f"{axis}={size}" for axis, size in run["mesh"].items() if size > 1]
    if run["servers"]:
        axes.append(f"servers={run['servers']}")
    ranks = f"{run['ranks']} rank{'s' * (run['ranks'] != 1)}" + (f" ({', '.join(axes)})" if axes else "")
    batch = f"batch {run['batch']}"
    if run["accumulate"] > 1:
        batch += f" in {run['accumulate']} micro-batches"
    total, first = run["total_steps"], run["start_step"] + 1
    if total is None:
        steps = "steps until the data ends"
    elif first > total:
        steps = f"none of {total} steps left"
    elif first > 1:
        steps = f"steps {first} to {total}"
    else:
        steps = f"{total} step{'s' * (total != 1)}"
    return [
        f"{run['model']}, {parameters}; plan {run['plan']}, {ranks} on {run['device']}",
        f"{batch}, {steps}; run folder {run['folder']}",
    ]


def _numbers(metrics: dict[str, Any]) -> str:
    memory = f"  {format_bytes(metrics['memory_bytes'])}" if "memory_bytes" in metrics else ""
    return f"loss {metrics['loss']:.4g}  {metrics['samples_per_s']:,.0f} samples/s{memory}"
