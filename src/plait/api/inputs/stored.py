"""What a run folder remembers of how it was started.

In: the folder. Out: options, for going on with it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from plait.api.inputs.settings import parse_arguments, parse_settings
from plait.errors import UsageError
from plait.files.document import Format
from plait.files.shape import read_json
from plait.files.unused import check_there
from plait.options import Changes, Saving
from plait.plan.plan import read_plan

SAVED = ("checkpoint_every", "record_samples", "keep", "keep_best", "log")
"""Fields of `Saving` that a run writes down."""
REMEMBERED = ("job", "settings", "args", "steps", "device", *SAVED)
"""What a run writes down of how it was started, and `resume` takes from there unless it is given anew."""
_OF_JOB = ("job_file", "job_sha256", "job_seal")
"""What a run remembers of its job's file, and the seal of whoever started it."""
_FORMAT = Format(noun="the environment of a run", error=UsageError, fix="give JOB and --plan again.")


class _Remembered(msgspec.Struct):
    job: str | None = None
    settings: list[str] | None = None
    args: list[str] | None = None
    steps: int | None = None
    device: str | None = None
    checkpoint_every: int | None = None
    record_samples: bool | None = None
    keep: int | None = None
    keep_best: str | None = None
    log: str | None = None
    job_file: str | None = None
    job_sha256: str | None = None
    job_seal: str | None = None


def stored_settings(folder: Path) -> dict[str, Any]:
    """What a run folder remembers of how it was started: `REMEMBERED`, and its plan."""
    path = folder / "environment.json"
    check_there(folder)
    if not path.exists():
        return {}
    remembered = read_json(path, _Remembered, _FORMAT)
    stored = {
        key: value for key in (*REMEMBERED, *_OF_JOB) if (value := getattr(remembered, key)) is not None
    }
    if (folder / "plan.yaml").exists():
        stored["plan_file"] = folder / "plan.yaml"
        stored["plan"] = read_plan(folder / "plan.yaml").name
    return stored


def stored_changes(stored: Mapping[str, Any], job: object) -> Changes:
    """What was changed of the job; its arguments where `job` is still a name."""
    settings = parse_settings(stored.get("settings", []))
    settings.pop("weights", None)  # the checkpoint's count
    args = parse_arguments(stored.get("args", [])) if isinstance(job, str) else {}
    return Changes(settings=settings, args=args)


def stored_saving(stored: Mapping[str, Any]) -> Saving:
    """What a run was asked to save."""
    return Saving(**{name: stored[name] for name in SAVED if stored.get(name) is not None})
