"""Where a run goes on from.

In: what a person asked for, a run folder. Out: a checkpoint and its step; or an error where the job is another one.
"""

from pathlib import Path

from plait.errors import CheckpointError, UsageError
from plait.job.job import Job
from plait.options import Listener
from plait.run.checkpoint.store import load_checkpoint, locate_checkpoint


def located(resume: str | Path | None, tell: Listener) -> Path | None:
    """The checkpoint to go on from."""
    if resume is None:
        return None
    return locate_checkpoint(Path(resume), on_notice=lambda text: tell({"notice": text}))


def holds_run(out: str | Path | None) -> bool:
    """Whether a run has begun to write to a folder."""
    return out is not None and (Path(out) / "metrics.jsonl").exists()


def last_of(folder: Path, tell: Listener) -> Path | None:
    """The last checkpoint of a run; None: it has none yet."""
    try:
        return located(folder, tell)
    except CheckpointError:
        return None


def continued_from(checkpoint: Path, job: Job) -> int:
    """The step to continue with; refuses a job under which it would not be the same run."""
    state = load_checkpoint(checkpoint)
    for name in ("seed", "batch"):
        before, now = state.extra.get(name), getattr(job, name)
        if before is not None and before != now:
            raise UsageError(
                f"the run was started with {name}={before}; the job now has {name}={now}, which gives other samples.",
                fix=f"use --set {name}={before}, or start a new run.",
            )
    return state.step
