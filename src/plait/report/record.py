"""Read what a run left in its folder.

In: the folder of a run. Out: a `RunRecord` that holds whatever is there and says what is not.
It never fails because a file is missing or was cut short by a crash; it fails when there is no such folder.

    plan.yaml   metrics.jsonl   environment.json   totals.json   outlived.json   trace/rank<k>.json
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from plait.errors import PlaitError, UsageError
from plait.files.document import Document, Format, as_text, read_bytes
from plait.files.holder import last_holder
from plait.files.records import read_records
from plait.files.shape import decode_python_json, shaped
from plait.trace.files import read_trace
from plait.trace.span import Trace
from plait.units import format_seconds

T = TypeVar("T")


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
    """What the run has outlived, and what is missing or could not be read, a sentence each."""


_OF_A_RUN = ("environment.json", "plan.yaml", "metrics.jsonl", "trace", "checkpoints", "totals.json")
"""What runs leave; one that was killed early, or whose files were taken away, has some of it."""


def read_run(run_dir: Path) -> RunRecord:
    """Everything that is readable in a run folder."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(
            f"there is no run folder {folder}.", fix="give the folder that `plait run` printed when it ended."
        )
    if any(folder.iterdir()) and not any((folder / name).exists() for name in _OF_A_RUN):
        raise UsageError(
            f"{folder} is no run folder: it has none of {', '.join(_OF_A_RUN)}.",
            fix="give the folder that `plait run` printed when it ended.",
        )
    notes: list[str] = []
    plan = _plan_text(folder / "plan.yaml", notes)
    lines = _lines(folder / "metrics.jsonl", notes)
    unknown = "machine and versions are unknown"
    environment = _object(folder / "environment.json", dict[str, Any], unknown, notes) or {}
    notes += _outlived(folder / "outlived.json", notes)
    notes += _missing_steps(lines, folder, environment.get("first_step"))
    notes += _cut_short(folder)
    trace = None
    try:
        trace = read_trace(folder)
    except PlaitError as error:
        notes.append(error.what)
    return RunRecord(
        folder=folder,
        plan=plan,
        metrics=tuple(line for line in lines if line.get("evaluate") is None),
        evaluations=tuple(line for line in lines if line.get("evaluate") is not None),
        environment=environment,
        totals=_totals(folder / "totals.json", notes),
        trace=trace,
        notes=tuple(notes),
    )


def _plan_text(path: Path, notes: list[str]) -> str | None:
    consequence = "the plan is unknown"
    if not path.exists():
        notes.append(f"{path.name} is missing: {consequence}.")
        return None
    try:
        return as_text(read_bytes(path, _FORMAT), path.name, _FORMAT)
    except PlaitError as error:
        notes.append(f"{error.what.rstrip('.')}: {consequence}.")
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
    entries, problems = [], list(found.problems)
    for number, entry in zip(found.numbers, found.entries, strict=True):
        try:
            shaped(Document(values=entry, where=""), _Line, _FORMAT)
            entries.append(entry)
        except PlaitError as error:
            problems.append((number, error.what.rstrip(".")))
    if problems:
        problems.sort()
        shown = ", ".join(str(number) for number, _ in problems[:5]) + (", …" if len(problems) > 5 else "")
        number, reason = problems[0]
        notes.append(
            f"{path.name} has {len(problems)} unreadable line(s), left out: {shown}; line {number}: {reason}."
        )
    return entries


def _missing_steps(lines: Sequence[Mapping[str, Any]], folder: Path, first: object) -> list[str]:
    """What the journal should hold and does not: every step from its first to its last, and to the last checkpoint."""
    steps = Counter(
        line["step"] for line in lines if line.get("evaluate") is None and line.get("step") is not None
    )
    last = max([*steps, *(num_steps - 1 for num_steps in _saved(folder))], default=-1)
    begin = first if type(first) is int and 0 <= first <= last else min(steps, default=last + 1)
    notes = []
    if holes := _gaps(sorted(step for step in steps if step >= begin), begin, last):
        num_missing = sum(until - since + 1 for since, until in holes)
        notes.append(f"metrics.jsonl lacks {num_missing} step(s): {_ranges(holes)}.")
    if twice := sorted(step for step, count in steps.items() if count > 1):
        told = _ranges([(step, step) for step in twice])
        notes.append(f"metrics.jsonl has {len(twice)} step(s) more than once: {told}.")
    return notes


def _saved(folder: Path) -> dict[int, str]:
    """Names of checkpoints by the steps that are done in them."""
    found = (
        re.fullmatch(r"step-([0-9]{8,18})(\.[0-9]+)?", path.name)
        for path in folder.glob("checkpoints/step-*")
    )
    return {int(match[1]): match[0] for match in found if match}


def _cut_short(folder: Path) -> list[str]:
    """Where a run failed or was killed, from where it can go on."""
    holder = last_holder(folder)
    if holder is None or not holder.is_dead:
        return []
    told = f"the run did not come to its end ({holder}, is gone)"
    if not (saved := _saved(folder)):
        return [f"{told}, and no checkpoint was saved: it has to begin anew."]
    return [
        f"{told}; its last checkpoint is {saved[max(saved)]}: plait run --resume {folder} goes on from there."
    ]


def _gaps(steps: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
    """(first, last) of every run of numbers that is not there."""
    around = zip([first - 1, *steps], [*steps, last + 1], strict=True)
    return [(before + 1, after - 1) for before, after in around if after > before + 1]


def _ranges(pairs: Sequence[tuple[int, int]]) -> str:
    told = [str(first) if first == last else f"{first} to {last}" for first, last in pairs[:8]]
    return ", ".join(told) + (", …" if len(pairs) > 8 else "")


class _Line(msgspec.Struct):
    """What a line of `metrics.jsonl` may say; losses and rates may be NaN or infinite."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    samples: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    grad_norm: float | None = None
    memory_bytes: float | None = None
    evaluate: dict[str, Any] | None = None


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class GraphCounts(msgspec.Struct):
    """What a rank has counted of graphs that differ from sample to sample."""

    batches: Count = 0
    calls: Count = 0
    vertices: Count = 0
    operations: Count = 0
    schedule_s: float = 0.0
    levels: list[Count] = []


class Compiled(msgspec.Struct):
    """What the first rank has compiled."""

    segments: Count = 0
    as_written: Count = 0
    waiting: Count = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    first_step: Count | None = None


class _Totals(msgspec.Struct):
    """What `totals.json` may say; the rest of it is not looked at."""

    steps: Count | None = None
    workers: Count | None = None
    servers: Count | None = None
    updates: Count | None = None
    staleness: dict[Count, Count] | None = None
    shares_by_worker: dict[Count, Count] | None = None
    bytes_sent: dict[Count, Count] | None = None
    gradient_bytes: Count | None = None
    graphs: list[GraphCounts] | None = None
    compiled: Compiled | None = None


class _Outlived(msgspec.Struct):
    """An entry of `outlived.json`: a change of the ranks of a run that goes on with those that are left."""

    what: str
    plan: str
    step: Count
    repeated_steps: Count
    source: str
    took_s: float | None = None


_FORMAT = Format(noun="an object", error=PlaitError, fix="run the job again.", max_bytes=64 << 20)


def _totals(path: Path, notes: list[str]) -> dict[str, Any]:
    """Nothing is said of a file that is missing: a run that goes on, or was cut short, has none."""
    if not path.exists():
        return {}
    found = _object(path, _Totals, "what ranks exchanged is unknown", notes)
    return {} if found is None else msgspec.structs.asdict(found)


def _outlived(path: Path, notes: list[str]) -> list[str]:
    """What the run has gone on after; most have no such file."""
    if not path.exists():
        return []
    found = _object(path, list[_Outlived], "what the run has outlived is unknown", notes) or []
    return [
        f"{one.what.rstrip('.')}: the run went on as {one.plan} with step {one.step + 1}, from {one.source}; "
        + ("" if one.took_s is None else f"it took {format_seconds(one.took_s)}, ")
        + f"{one.repeated_steps} step(s) were repeated."
        for one in found
    ]


def _object(path: Path, schema: type[T], consequence: str, notes: list[str]) -> T | None:
    if not path.exists():
        notes.append(f"{path.name} is missing: {consequence}.")
        return None
    try:
        return decode_python_json(read_bytes(path, _FORMAT), schema, path.name, _FORMAT)
    except PlaitError as error:
        notes.append(f"{error.what.rstrip('.')}: {consequence}.")
        return None
