"""What people write on the command line, turned into jobs and settings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from plait.errors import UsageError
from plait.files.document import Format, parse_yaml
from plait.files.shape import read_json
from plait.job.job import Job
from plait.plan.plan import SETTINGS, read_plan

_PLAN_GROUPS = tuple(dict.fromkeys(s.partition(".")[0] for s in SETTINGS if "." in s))
_JOB_KEYS = (
    "batch",
    "epochs",
    "steps",
    "seed",
    "clip_norm",
    "accumulate",
    "precision",
    "evaluate_every",
    "shuffle",
    "batch_norm",
)

REMEMBERED = ("job", "settings", "steps", "device", "checkpoint_every", "record_samples")
"""Options that --resume takes from the run, unless they are given anew."""


_VALUE = Format(noun="a value", error=UsageError, fix="quote it, or use a plain value.")
_FORMAT = Format(noun="the environment of a run", error=UsageError, fix="give JOB and --plan again.")


class _Remembered(msgspec.Struct):
    job: str | None = None
    settings: list[str] | None = None
    steps: int | None = None
    device: str | None = None
    checkpoint_every: int | None = None
    record_samples: bool | None = None


def parse_settings(entries: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`key=value` entries as (settings of the job, settings of the plan)."""
    job: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    for entry in entries:
        key, separator, text = entry.partition("=")
        if not separator or not key:
            raise UsageError(f"--set {entry!r} is not KEY=VALUE.", fix="write it like --set batch=128.")
        value = parse_yaml(text, f"--set {entry!r}", _VALUE).values
        group, dot, name = key.partition(".")
        if key in SETTINGS and not dot:
            plan[key] = value
        elif dot and group in _PLAN_GROUPS:
            plan.setdefault(group, {})[name] = value
        elif key in _JOB_KEYS:
            job[key] = value
        else:
            raise UsageError(
                f"--set {key}: there is no such setting.",
                fix=f"of the job: {', '.join(_JOB_KEYS)}; of the plan: {', '.join(SETTINGS)}.",
            )
    return job, plan


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """`data=2,tensor=2` as axes and their sizes."""
    if text is None:
        return None
    mesh: dict[str, int] = {}
    for entry in text.split(","):
        name, separator, size = entry.strip().partition("=")
        if not separator or not re.fullmatch("[0-9]{1,9}", size) or name in mesh:
            raise UsageError(
                f"--mesh {text!r} is not AXIS=SIZE,...", fix="write it like --mesh data=2,tensor=2."
            )
        mesh[name] = int(size)
    return mesh


def parse_slow(entries: Sequence[str]) -> dict[int, float]:
    """`RANK=FACTOR` entries as how many times as long a rank takes to compute."""
    slow: dict[int, float] = {}
    for entry in entries:
        rank, _, factor = entry.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError as error:
            raise UsageError(
                f"--slow {entry!r} is not RANK=FACTOR.", fix="write it like --slow 1=3."
            ) from error
    return slow


def job_with(job: Job, settings: Mapping[str, Any]) -> Job:
    """The job with some of its plain fields replaced."""
    if not settings:
        return job
    changed = dict(settings)
    if "steps" in changed and "epochs" not in changed:
        changed["epochs"] = None
    if "epochs" in changed and "steps" not in changed:
        changed["steps"] = None
    assert set(changed) <= {field.name for field in fields(Job)}
    return replace(job, **changed)


def load_run_settings(folder: Path) -> dict[str, Any]:
    """What a run folder remembers of how it was started, for --resume."""
    path = folder / "environment.json"
    if not folder.is_dir():
        raise UsageError(
            f"there is no run folder {folder} to resume.", fix="give the folder that plait run printed."
        )
    if not path.exists():
        return {}
    remembered = read_json(path, _Remembered, _FORMAT)
    stored = {key: value for key in REMEMBERED if (value := getattr(remembered, key)) is not None}
    if (folder / "plan.yaml").exists():
        stored["plan_file"] = folder / "plan.yaml"
        stored["plan"] = read_plan(folder / "plan.yaml").name
    return stored
