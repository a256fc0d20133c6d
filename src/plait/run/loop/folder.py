"""The run folder: everything that a run leaves behind, in files that people and programs can read.

plan.yaml   environment.json   metrics.jsonl   samples.jsonl (on request)   totals.json   trace/   checkpoints/
report.html
"""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch

from plait.errors import UsageError
from plait.plan.plan import Plan


def make_run_folder(out: Path | None, name: str, *, resuming: bool) -> Path:
    """A fresh folder under runs/, or the one asked for, which must not hold a run already unless that is resumed."""
    if out is not None:
        if (out / "metrics.jsonl").exists() and not resuming:
            raise UsageError(
                f"{out} already holds a run.",
                fix=f"choose another --out, or continue it with --resume {out}.",
            )
        folder = out
    else:
        folder = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if out is None:
            folder = _claim(folder)
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the run folder {folder} cannot be made: {error.strerror}.", fix="choose another --out."
        ) from error
    return folder


def _claim(folder: Path) -> Path:
    """Make a folder of this name that nobody else has made, also not a run started in the same second."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    number, wanted = 1, folder
    while True:
        try:
            wanted.mkdir()
        except FileExistsError:
            number += 1
            wanted = folder.with_name(f"{folder.name}-{number}")
        else:
            return wanted


def discard_if_empty(folder: Path) -> None:
    """Take back a run folder into which nothing was written."""
    with suppress(OSError):
        (folder / "checkpoints").rmdir()
        folder.rmdir()


def write_environment(folder: Path, extra: Mapping[str, Any]) -> None:
    """Versions, machine and settings, so that a run can be told apart and repeated."""
    content = {
        "plait": version("plait"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **extra,
    }
    (folder / "environment.json").write_text(json.dumps(content, indent=2, default=str) + "\n")


def write_totals(folder: Path, plan: Plan, summary: Mapping[str, Any]) -> None:
    """What ranks have exchanged and applied in this run, for its report; the last run of a folder that was resumed."""
    kept = ("updates", "staleness", "shares_by_worker", "bytes_sent", "gradient_bytes")
    content = {
        "steps": len(summary["losses"]),
        "workers": plan.mesh.size,
        "servers": plan.sync.servers,
        **{key: summary[key] for key in kept if key in summary},
    }
    (folder / "totals.json").write_text(json.dumps(content, indent=2) + "\n")


class LineFile:
    """A JSON-lines file, flushed about once a second and on close."""

    def __init__(self, path: Path, *, keep_below: int | None = None) -> None:
        if keep_below is not None and path.exists():
            _drop_lines(path, keep_below)
        self._file: TextIO = path.open("a")
        self._flushed = time.monotonic()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one entry."""
        self._file.write(json.dumps(entry) + "\n")
        now = time.monotonic()
        if now - self._flushed > 1.0:
            self._file.flush()
            self._flushed = now

    def flush(self) -> None:
        """Hand everything to the system, so that it outlives this process."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_lines(path: Path, step: int) -> None:
    """On resume: forget what was written after the checkpoint, and a torn last line."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line).get("step", 0) < step:
                kept.append(line)
        except json.JSONDecodeError:
            continue
    path.write_text("".join(line + "\n" for line in kept))
