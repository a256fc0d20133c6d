"""A published measurement, read from a line of a file.

In: JSON lines with `id`, `kind`, `source`, `model`, `cluster`, `plan`, `measured`. Out: `Case`s, and for every line
that holds none the reason. Nothing is predicted here, and nothing that is missing is made up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from plait.errors import PlaitError, UsageError
from plait.files.document import Document, Format, read_bytes
from plait.files.shape import decode_json, shaped


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement."""

    id: str
    kind: str
    source: str
    """The publication."""
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    plan: Mapping[str, Any]
    measured: Mapping[str, Any]
    unknown: tuple[str, ...] = ()
    """Fields of the line that the format does not have."""

    @property
    def failed(self) -> bool:
        """Whether the configuration did not run."""
        return bool(self.measured.get("failed"))

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a training step."""
        return number(self.measured.get("step_s"))

    @property
    def memory_bytes(self) -> float | None:
        """Measured peak memory of a device."""
        gib = number(self.measured.get("memory_gib"))
        return None if gib is None else gib * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """A line that holds no case."""

    line: int
    """Counted from 1."""
    reason: str


class _Row(msgspec.Struct):
    """A line as it stands."""

    kind: Literal["training_run", "memory", "layer_time", "pipeline_schedule", "collective", "hardware"]
    id: str | int | None = None
    source: str | None = None
    table: Any = None
    model: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    assumed: Any = None
    missing: Any = None


_FORMAT = Format(noun="a case", error=PlaitError, fix="mend that line.")
_LARGEST = 2**48
"""No count or measurement of a case is larger."""


def read_case_file(path: Path) -> tuple[list[Case], list[BadLine]]:
    """All cases of a file, and what its other lines are."""
    form = Format(
        noun="a file of cases", error=UsageError, fix="give one JSON object a line.", max_bytes=256 << 20
    )
    text = read_bytes(path, form).decode("utf-8", errors="replace")
    cases, bad = read_cases(text.split("\n"))
    if not cases and not bad:
        raise UsageError(f"{path} holds no cases.", fix="give a file with one JSON object a line.")
    return cases, bad


def read_cases(lines: Iterable[str]) -> tuple[list[Case], list[BadLine]]:
    """All cases, and what the other lines are; empty lines are neither."""
    cases: list[Case] = []
    bad: list[BadLine] = []
    for index, text in enumerate(lines, 1):
        if not text.strip():
            continue
        found = _read(text, index)
        (cases if isinstance(found, Case) else bad).append(found)  # type: ignore[arg-type]
    return cases, bad


def _read(text: str, index: int) -> Case | BadLine:
    try:
        values = decode_json(text.encode("utf-8"), dict[str, Any], "", _FORMAT)
        row = shaped(Document(values=values, where=""), _Row, _FORMAT)
    except PlaitError as error:
        return BadLine(line=index, reason=error.what.rstrip("."))
    return Case(
        id=str(f"line {index}" if row.id is None else row.id),
        kind=row.kind,
        source=row.source or "unknown source",
        unknown=tuple(sorted(set(values) - set(_Row.__struct_fields__))),
        model=row.model or {},
        cluster=row.cluster or {},
        plan=row.plan or {},
        measured=row.measured or {},
    )


def number(value: Any) -> float | None:
    """A positive number that a measurement may be, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 < value < _LARGEST else None


def whole(value: Any, default: int | None = None) -> int | None:
    """A positive whole number, or the default."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else default
