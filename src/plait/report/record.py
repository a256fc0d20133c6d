"""Read what a run left in its folder.

In: the folder of a run. Out: a `RunRecord` that holds whatever is there and says what is not.
It never fails because a file is missing or was cut short by a crash; it fails when there is no such folder.

    plan.yaml   metrics.jsonl   environment.json   totals.json   trace/rank<k>.json
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, UsageError
from plait.files.records import read_records
from plait.trace.files import read_trace
from plait.trace.span import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The files of a run folder, read."""

    folder: Path
    """Where they were read from."""
    plan: str | None
    """The text of `plan.yaml`."""
    metrics: tuple[Mapping[str, Any], ...]
    """The training lines of `metrics.jsonl`, in order."""
    evaluations: tuple[Mapping[str, Any], ...]
    """The lines of `metrics.jsonl` that hold `evaluate`, in order."""
    environment: Mapping[str, Any]
    """The content of `environment.json`."""
    totals: Mapping[str, Any]
    """The content of `totals.json`; empty where the run did not end."""
    trace: Trace | None
    """The trace, where one was recorded."""
    notes: tuple[str, ...]
    """What is missing or could not be read, a sentence each."""


def read_run(run_dir: Path) -> RunRecord:
    """Everything that is readable in a run folder."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(
            f"there is no run folder {folder}.", fix="give the folder that `plait run` printed when it ended."
        )
    notes: list[str] = []
    plan = _text(folder / "plan.yaml", "the plan is unknown", notes)
    lines = _lines(folder / "metrics.jsonl", notes)
    environment = _object(folder / "environment.json", "machine and versions are unknown", notes)
    notes += _missing_steps(lines, folder, environment.get("first_step"))
    trace = None
    try:
        trace = read_trace(folder)
    except PlaitError as error:
        notes.append(error.what)
    return RunRecord(
        folder=folder,
        plan=plan,
        metrics=tuple(line for line in lines if "evaluate" not in line),
        evaluations=tuple(line for line in lines if isinstance(line.get("evaluate"), dict)),
        environment=environment,
        totals=_totals(folder / "totals.json", notes),
        trace=trace,
        notes=tuple(notes),
    )


def _text(path: Path, consequence: str, notes: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: {consequence}.")
    except (OSError, UnicodeDecodeError) as error:
        notes.append(f"{path.name} cannot be read ({error}): {consequence}.")
    return None


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    consequence = "no losses or throughput to show"
    try:
        found = read_records(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: {consequence}.")
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error}): {consequence}.")
        return []
    if found.problems:
        shown = ", ".join(str(number) for number, _ in found.problems[:5])
        more = ", …" if len(found.problems) > 5 else ""
        number, reason = found.problems[0]
        notes.append(
            f"{path.name} has {len(found.problems)} unreadable line(s), left out: {shown}{more};"
            f" line {number}: {reason}."
        )
    return list(found.entries)


def _missing_steps(lines: Sequence[Mapping[str, Any]], folder: Path, first: object) -> list[str]:
    """What the journal should hold and does not: every step from its first to its last, and to the last checkpoint."""
    steps = Counter(
        line["step"] for line in lines if "evaluate" not in line and type(line.get("step")) is int
    )
    saved = [
        int(match[1]) - 1
        for path in folder.glob("checkpoints/step-*")
        if (match := re.fullmatch(r"step-([0-9]{8,18})(\.[0-9]+)?", path.name))
    ]
    last = max([*steps, *saved], default=-1)
    begin = first if type(first) is int else min(steps, default=last + 1)
    notes = []
    if holes := _gaps(sorted(step for step in steps if step >= begin), begin, last):
        num_missing = sum(until - since + 1 for since, until in holes)
        notes.append(f"metrics.jsonl lacks {num_missing} step(s): {_ranges(holes)}.")
    if twice := sorted(step for step, count in steps.items() if count > 1):
        told = _ranges([(step, step) for step in twice])
        notes.append(f"metrics.jsonl has {len(twice)} step(s) more than once: {told}.")
    return notes


def _gaps(steps: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
    """(first, last) of every run of numbers that is not there."""
    around = zip([first - 1, *steps], [*steps, last + 1], strict=True)
    return [(before + 1, after - 1) for before, after in around if after > before + 1]


def _ranges(pairs: Sequence[tuple[int, int]]) -> str:
    told = [str(first) if first == last else f"{first} to {last}" for first, last in pairs[:8]]
    return ", ".join(told) + (", …" if len(pairs) > 8 else "")


def _totals(path: Path, notes: list[str]) -> dict[str, Any]:
    """Nothing is said of a file that is missing: a run that goes on, or was cut short, has none."""
    return _object(path, "what ranks exchanged is unknown", notes) if path.exists() else {}


def _object(path: Path, consequence: str, notes: list[str]) -> dict[str, Any]:
    text = _text(path, consequence, notes)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        notes.append(f"{path.name} is not JSON ({error}): {consequence}.")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a JSON object: {consequence}.")
        return {}
    return value
