"""A published measurement, read from a line of a file.

In: JSON lines with `id`, `kind`, `source`, `model`, `cluster`, `plan`, `measured`. Out: `Case`s, and for every line
that holds none the reason. Nothing is predicted here, and nothing that is missing is made up.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("training_run", "memory", "layer_time", "pipeline_schedule", "collective", "hardware")
"""Kinds of measurements that the format knows."""


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


_FIELDS = {"id", "kind", "source", "table", "model", "cluster", "plan", "measured", "assumed", "missing"}


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
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadLine(line=index, reason=f"not JSON: {error}")
    if not isinstance(values, dict):
        return BadLine(line=index, reason=f"not an object but {type(values).__name__}")
    parts = {name: values.get(name) for name in ("model", "cluster", "plan", "measured")}
    wrong = [name for name, part in parts.items() if part is not None and not isinstance(part, Mapping)]
    if wrong:
        return BadLine(line=index, reason=f"{', '.join(wrong)} is no object")
    kind = values.get("kind")
    if kind not in KINDS:
        return BadLine(line=index, reason=f"kind {kind!r} is not one of {', '.join(KINDS)}")
    return Case(
        id=str(values.get("id", f"line {index}")),
        kind=kind,
        source=str(values.get("source", "unknown source")),
        unknown=tuple(sorted(set(values) - _FIELDS)),
        **{name: part or {} for name, part in parts.items()},
    )


def number(value: Any) -> float | None:
    """A positive finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 < value < float("inf") else None


def whole(value: Any, default: int | None = None) -> int | None:
    """A positive whole number, or the default."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else default
