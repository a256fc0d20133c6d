"""Where a run goes on from.

In: what a person asked for, a run folder. Out: a checkpoint and its step, and what has changed since; or an error where
the job is another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.errors import CheckpointError, UsageError
from plait.job.job import Job
from plait.options import Listener
from plait.plan.plan import Plan
from plait.run.checkpoint.store import load_checkpoint, locate_checkpoint
from plait.run.parent.sound import Said, check_sound, said_by


def located(resume: str | Path | None, tell: Listener) -> Path | None:
    """The checkpoint to go on from."""
    if resume is None:
        return None
    return locate_checkpoint(Path(resume), on_notice=lambda text: tell({"notice": text}))


def last_of(folder: Path, tell: Listener) -> Path | None:
    """The last checkpoint of a run; None: it has none yet."""
    try:
        return located(folder, tell)
    except CheckpointError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """A run that goes on."""

    step: int = 0
    """The step to continue with."""
    said: Said | None = None
    """What the checkpoint says of the run that wrote it; None: of a run that begins."""
    odd: Sequence[str] = ()
    """What is odd about it, a sentence each."""

    def changes(self, job: Job, plan: Plan, num_samples: int | None) -> list[str]:
        """What is no longer as it was, a sentence each; `num_samples` of the data are there now."""
        found, said = list(self.odd), self.said
        if said is None:
            return found
        if said.num_samples != num_samples:
            before, now = (
                "a stream" if count is None else f"{count} samples"
                for count in (said.num_samples, num_samples)
            )
            found.append(
                f"the data is {now} and was {before}: epochs have another length from here on, and the samples that "
                "come next are not those that would have come."
            )
        for name in ("shuffle", "drop_last"):
            if (before := getattr(said, name)) != (now := getattr(job, name)):
                found.append(f"{name} is {now} and was {before}: other samples come next.")
        if _length(said) != _length(job):
            found.append(f"the run ends with {_length(job)}; it was begun with {_length(said)}.")
        workers = said.workers
        kept = (plan.sync.rule, plan.mesh.size)
        if workers is not None and workers.count and (workers.rule, workers.count) != kept:
            held = f"{workers.count} workers under {workers.rule}"
            found.append(
                f"{held} had weights of their own, which are left: all go on from what they agreed on."
            )
        return found


def _length(of: Said | Job) -> str:
    return f"steps={of.steps}" if of.steps is not None else f"epochs={of.epochs}"


def continued_from(checkpoint: Path, job: Job) -> Continued:
    """Where it goes on; refuses a job under which it would not be the same run."""
    state = load_checkpoint(checkpoint)
    said = said_by(state, checkpoint)
    odd = check_sound(state, job.in_steps(said.num_samples), checkpoint)
    for name in ("seed", "batch"):
        before, now = getattr(said, name), getattr(job, name)
        if before != now:
            raise UsageError(
                f"the run was started with {name}={before}; the job now has {name}={now}, which gives other samples.",
                fix=f"use --set {name}={before}, or start a new run.",
            )
    return Continued(step=state.step, said=said, odd=odd)
