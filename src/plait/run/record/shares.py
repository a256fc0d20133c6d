"""What workers that do not march in step have done, in a file that outlives every process.

In: what a worker tells of each share of a step. Out: `shares.jsonl` in the run folder, a record for each, handed to the
system before the parent hears of it. The parent's journal is made of these shares; where the parent was killed before
it had written them down, the next run finds them here. A run that ends leaves no such file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from plait.files.records import append, read_records, sealed
from plait.files.write import open_to_append

_NAME = "shares.jsonl"


class ShareRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of one step."""

    step: int
    share: int
    epoch: int
    total: float
    """The loss, summed over the samples."""
    weight: float
    """What the sum is divided by."""
    samples: int
    lr: float
    ended_s: float
    """On the host's monotonic clock."""
    memory_bytes: int
    step_s: float = 0.0
    """How long the worker took for it."""
    grad_norm: float | None = None
    ends_epoch: bool = False
    ids: list[int] = []


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the file: a share, or a measurement on held-out data."""

    rank: int
    share: ShareRecord | None = None
    evaluated: dict[str, Any] | None = None


class ShareLog:
    """The file, as one worker appends to it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank, self._path = rank, folder / _NAME
        self._file = open_to_append(self._path)

    def write(self, event: Mapping[str, Any]) -> None:
        """Append a record in one call of the system, so that records of several workers do not mix."""
        append(self._file, sealed({"rank": self._rank, **event}).encode("utf-8"), self._path, alone=False)

    def close(self) -> None:
        """Nothing more comes from this worker."""
        os.close(self._file)


def left_shares(folder: Path) -> list[Event]:
    """What a run that was killed left behind, as far as it is readable."""
    path = folder / _NAME
    if not path.exists():
        return []
    events = []
    for entry in read_records(path).entries:
        try:
            events.append(msgspec.convert(entry, Event))
        except msgspec.ValidationError:
            continue  # not a worker's; what is missing then is told by the report
    return events


def drop_shares(folder: Path) -> None:
    """All of it is in the journal."""
    (folder / _NAME).unlink(missing_ok=True)
