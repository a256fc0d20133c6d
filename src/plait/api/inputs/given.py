"""What people write for a job and its settings.

In: a job or a reference to one, settings. Out: a `Job` with its name, and what the settings say of the plan.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from plait.api.inputs.settings import split_settings
from plait.errors import JobError, UsageError
from plait.job.data.fold import Fold
from plait.job.job import Job
from plait.job.named.reference import load_job
from plait.options import Changes


def given_job(job: Job | str, changes: Changes = Changes()) -> tuple[Job, dict[str, Any]]:
    """The job with its part of the settings, and the plan's part.

    Text is a reference as on the command line: `path.py:function`, `module:function`. Settings are plain fields of the
    job ({"batch": 128}) and groups of the plan ({"sync": {"bucket_mib": 4}}).
    """
    args = changes.args
    if not isinstance(job, (Job, str)):
        raise JobError(
            f"a plait.Job, or text that names one, was expected, not {type(job).__name__}.",
            fix="call your job function first: train(job()).",
        )
    if args and not isinstance(job, str):
        raise UsageError(
            f"args ({', '.join(args)}) are for a job that is named, and this is a Job that has been made.",
            fix="call your function with them: train(job(lr=3e-4)), or name it: "
            'train("path.py:job", changes=Changes(args=...)).',
        )
    of_job, of_plan = split_settings(changes.settings)
    return job_with(load_job(job, args) if isinstance(job, str) else job, of_job), of_plan


def name_of(job: Job | str) -> str:
    """What tables and folders call it."""
    return Path(job.split(":")[0]).stem if isinstance(job, str) else "job"


def job_with(job: Job, settings: Mapping[str, Any]) -> Job:
    """The job with some of its plain fields replaced; `fold` is last, the data without a part of it."""
    if not settings:
        return job
    changed = dict(settings)
    fold = changed.pop("fold", None)
    if "steps" in changed and "epochs" not in changed:
        changed["epochs"] = None
    if "epochs" in changed and "steps" not in changed:
        changed["steps"] = None
    assert set(changed) <= {field.name for field in fields(Job)}
    changed_job = replace(job, **changed)
    return changed_job if fold is None else _held_out(changed_job, fold)


def _held_out(job: Job, text: str) -> Job:
    """The job that trains on all but a part of its data, and is evaluated on that part alone."""
    if job.sampler is not None:
        raise UsageError(
            f"fold={text}: the job's own sampler says which samples are read, and may name those held out.",
            fix="leave out Job(sampler=...), or give data and evaluate of your own for each fold.",
        )
    fold = Fold.parse(text, job.data)
    kept: dict[str, Any] = {
        name: [given[index] for index in fold.ids(len(given)).tolist()]
        for name in ("lengths", "work")
        if (given := getattr(job, name)) is not None
    }
    return replace(job, data=fold, evaluate=replace(fold, held_out=True), **kept)
