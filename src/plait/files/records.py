"""Records, one JSON object a line, each with a sum of its own: what a run writes down as it goes.

In: objects. Out: lines that end in `"sum": "<CRC-32 of the rest>"`, only ever appended; and such a file read back, each
line of it a record or a problem that is named by its number. A kill at any moment tears at most the last line.

    {"step": 3, "epoch": 0, "loss": 0.52, "sum": "9f3a1c22"}
"""

import errno
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plait.files.write import cannot_write, open_to_append, ordinary, write_whole

_SUM = re.compile(r', "sum": "([0-9a-f]{8})"\}$')
_FLUSH_EVERY_S = 1.0
"""What a killed process may lose of its records."""
_LINE_BYTES = 64 << 20
"""The longest line that is believed to be a record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """What a file of records holds."""

    entries: tuple[dict[str, Any], ...]
    """The records, without their sums, in the order of the file."""
    lines: tuple[str, ...]
    """Each record's own line."""
    numbers: tuple[int, ...]
    """The number of each record's line, counted from 1."""
    problems: tuple[tuple[int, str], ...]
    """(number of a line, what is wrong with it)."""


def sealed(entry: Mapping[str, Any]) -> str:
    """A record as a line, with its sum."""
    body = json.dumps(entry)
    assert entry and "sum" not in entry, "a record has fields, and none is called sum"
    return f'{body[:-1]}, "sum": "{_sum(body)}"}}\n'


def opened(line: str) -> dict[str, Any]:
    """The record in a line; a `ValueError` says what it is instead. Lines of older runs have no sum."""
    if len(line) > _LINE_BYTES:
        raise ValueError(f"it has {len(line)} characters, a record at most {_LINE_BYTES}")
    try:
        entry = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(entry, ensure_ascii=False).encode("utf-8")  # half a character is no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise ValueError(f"it is a JSON {type(entry).__name__}, not an object")
    if "sum" not in entry:
        return entry
    match = _SUM.search(line)
    if match is None or _sum(line[: match.start()] + "}") != match[1]:
        raise ValueError("its sum does not fit: it was changed after it was written")
    del entry["sum"]
    return entry


def read_records(path: Path) -> Records:
    """Every line of a file; raises `OSError` where there is none."""
    entries: list[dict[str, Any]] = []
    lines: list[str] = []
    numbers: list[int] = []
    problems: list[tuple[int, str]] = []
    with open(path, encoding="utf-8", errors="replace", newline="\n", opener=ordinary) as file:
        for number, text in enumerate(file, start=1):
            line = text.rstrip("\n")
            if not line.strip():
                continue
            try:
                entries.append(opened(line))
                lines.append(line)
                numbers.append(number)
            except ValueError as error:
                problems.append((number, str(error)))
    return Records(
        entries=tuple(entries), lines=tuple(lines), numbers=tuple(numbers), problems=tuple(problems)
    )


class RecordFile:
    """A file of records, open for appending; flushed about once a second, when asked, and on close."""

    def __init__(self, path: Path, *, keep: Callable[[Mapping[str, Any]], bool] | None = None) -> None:
        """`keep`: which of the records that are there stay; the others, and torn lines, go in one rename."""
        if keep is not None and path.exists():
            found = read_records(path)
            kept = [line for line, entry in zip(found.lines, found.entries, strict=True) if keep(entry)]
            content = "".join(f"{line}\n" for line in kept).encode("utf-8")
            if len(content) != path.stat().st_size:
                write_whole(path, content)
        self._path = path
        self._file = open_to_append(path)
        self._waiting = bytearray()
        self._flushed_s = time.monotonic()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one record."""
        self._waiting += sealed(entry).encode("utf-8")
        if time.monotonic() - self._flushed_s > _FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the system, so that it outlives this process; a record fits whole or is not there."""
        waiting, self._waiting = (
            bytes(self._waiting),
            bytearray(),
        )  # what failed is not tried again at the end
        append(self._file, waiting, self._path, alone=True)
        self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush()
        finally:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def append(file: int, data: bytes, path: Path, *, alone: bool) -> None:
    """Append all of it; where there is no room, and nobody else appends to the file, none of it. A file that somebody
    has removed takes no more: what is written to it is lost."""
    status = os.fstat(file)
    written, before = 0, status.st_size
    try:
        if data and not status.st_nlink:
            raise OSError(errno.ENOENT, "it was removed meanwhile")
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError as error:
        if alone:
            with suppress(OSError):
                os.ftruncate(file, before)
        raise cannot_write(path, error, len(data)) from error


def _sum(body: str) -> str:
    return f"{zlib.crc32(body.encode('utf-8')):08x}"
