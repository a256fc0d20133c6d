"""The run folder: everything that a run leaves behind, in files that people and programs can read.

plan.yaml   environment.json   metrics.jsonl   samples.jsonl (on request)   totals.json   trace/   checkpoints/
report.html   outlived.json (where ranks were lost, and the run went on)
"""

import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from plait.errors import UsageError
from plait.files.holder import LOCK_NAME
from plait.files.unused import check_unused
from plait.files.write import release_reserve, write_whole
from plait.plan.plan import Plan
from plait.version import VERSION


def make_run_folder(out: Path | None, name: str, *, resuming: bool) -> Path:
    """A fresh folder under runs/, or the one asked for, which must not hold a run already unless that is resumed."""
    if out is not None:
        if not resuming:
            check_unused(out)
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
    release_reserve(folder)
    with suppress(OSError):
        (folder / "checkpoints").rmdir()
        if {path.name for path in folder.iterdir()} <= {LOCK_NAME}:
            (folder / LOCK_NAME).unlink(missing_ok=True)
        folder.rmdir()


class Begun(msgspec.Struct):
    """What `environment.json` says of how a run began."""

    first_step: int | None = None
    """With which its records begin."""
    run: str | None = None
    """By which it is told apart from all others; None: it is there no more, or an older plait wrote it."""

    @classmethod
    def of(cls, folder: Path) -> "Begun":
        """As far as it can be read."""
        with suppress(OSError, msgspec.DecodeError, RecursionError):
            return msgspec.json.decode((folder / "environment.json").read_bytes(), type=cls)
        return cls()


def write_environment(folder: Path, extra: Mapping[str, Any], *, start_step: int = 0) -> None:
    """Versions, machine and settings, so that a run can be told apart and repeated; and with which step its records
    begin, which stays as it was where a run is resumed in its own folder."""
    before = Begun.of(folder)
    system = os.uname()  # `platform.platform` would start a program, and wait for it for ever
    content = {
        "plait": VERSION,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": f"{system.sysname}-{system.release}-{system.machine}-with-{''.join(platform.libc_ver())}",
        "cpus": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "first_step": start_step if before.first_step is None else before.first_step,
        "run": before.run or uuid.uuid4().hex,
        **extra,
    }
    write_whole(folder / "environment.json", json.dumps(content, indent=2, default=str) + "\n")


def write_totals(folder: Path, plan: Plan, summary: Mapping[str, Any]) -> None:
    """What ranks have exchanged and applied in this run, for its report; the last run of a folder that was resumed."""
    kept = ("updates", "staleness", "shares_by_worker", "bytes_sent", "gradient_bytes", "graphs", "compiled")
    content = {
        "steps": len(summary["losses"]),
        "workers": plan.mesh.size,
        "servers": plan.sync.servers,
        **{key: summary[key] for key in kept if key in summary},
    }
    write_whole(folder / "totals.json", json.dumps(content, indent=2) + "\n")
