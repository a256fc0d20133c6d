"""Read what a run left in its folder.

In: the folder of a run. Out: a `RunRecord` that holds whatever is there and says what is not.
It never fails because a file is missing or was cut short by a crash; it fails when there is no such folder.

    plan.yaml   metrics.jsonl   environment.json   totals.json   trace/rank<k>.json
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, UsageError
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
    text = _text(path, "no losses or throughput to show", notes)
    if text is None:
        return []
    lines = []
    broken = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            lines.append(value)
        else:
            broken.append(number)
    if broken:
        shown = ", ".join(str(number) for number in broken[:5]) + (", …" if len(broken) > 5 else "")
        notes.append(f"{path.name} has {len(broken)} unreadable line(s), left out: {shown}.")
    return lines


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
