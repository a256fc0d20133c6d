"""The runs of a try: `plait run` as processes of this machine, side by side.

In: arguments of `plait run`, and where a run's folder is. Out: how it ended. A run that was begun before goes on from
its last checkpoint. They die with the process that started them, however it went.
"""

import math
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.api.trials.board import Outcome
from plait.errors import CheckpointError
from plait.files.write import add_to, write_whole
from plait.report.record import read_run
from plait.run.checkpoint.store import locate_checkpoint
from plait.run.engines.host import HostTask

_ERROR = re.compile(r"^\w*Error: ", re.MULTILINE)
_MOST_TOLD = 300
"""Characters of an error that a table shows; the rest is beside the run folder."""
_LOOK_S = 0.02
"""Between two looks at a run."""
_SAVE_S = 60.0
"""For runs that are interrupted to save."""


@dataclass(kw_only=True, slots=True)
class Running:
    """One run that is under way."""

    folder: Path
    slot: int
    """Which of the places on this machine it has."""
    task: HostTask
    since_s: float = field(default_factory=time.monotonic)

    def poll(self) -> int | None:
        """Its exit code, once it has ended; what it says is kept beside its folder."""
        said, code = self.task.read(_LOOK_S)
        if said:
            add_to(self.folder.with_suffix(".txt"), said)
        return code


def start(
    arguments: Sequence[str],
    folder: Path,
    slot: int,
    variables: Mapping[str, str],
    steps: int | None,
    engine: Sequence[str] = (),
) -> Running:
    """Begin a run, or go on with it; `arguments` are those of a new one."""
    told = ["--no-trace", *(("--steps", str(steps)) if steps is not None else ()), *engine]
    if _has_checkpoint(folder):
        words = ["run", "--resume", str(folder), *told]
    else:
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was killed early has left
        words = ["run", *arguments, "--out", str(folder), *told]
    write_whole(folder.with_suffix(".txt"), b"")
    return Running(folder=folder, slot=slot, task=HostTask(words, variables, None, os.getcwd()))


def _has_checkpoint(folder: Path) -> bool:
    try:
        locate_checkpoint(folder, on_notice=lambda text: None)
    except CheckpointError:
        return False
    return (folder / "environment.json").exists()


def outcome_of(run: Running, code: int, metric: str) -> Outcome:
    """What a run that has ended is worth: its last evaluation."""
    seconds = round(time.monotonic() - run.since_s, 3)
    if code != 0:
        return Outcome(failed=_why(run.folder, code), seconds=seconds)
    record = read_run(run.folder)
    score = record.evaluations[-1]["evaluate"].get(metric) if record.evaluations else None
    steps = int(record.metrics[-1]["step"]) + 1 if record.metrics else 0
    if score is None or not math.isfinite(score):
        return Outcome(failed=f"its {metric} is {score}", steps=steps, seconds=seconds)
    return Outcome(score=float(score), steps=steps, seconds=seconds)


def _why(folder: Path, code: int) -> str:
    text = folder.with_suffix(".txt").read_text(errors="replace")
    errors = list(_ERROR.finditer(text))
    what = text[errors[0].start() :].splitlines()[0] if errors else f"exit code {code}"
    return what[:_MOST_TOLD]


def interrupt(runs: Sequence[Running]) -> None:
    """Ctrl-C for all: each saves, for the same command to go on."""
    for run in runs:
        run.task.signal(signal.SIGINT)
    deadline_s = time.monotonic() + _SAVE_S
    for run in runs:
        while run.poll() is None and time.monotonic() < deadline_s:
            pass
