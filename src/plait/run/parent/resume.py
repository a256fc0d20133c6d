"""Where a run goes on from.

In: what a person asked for, a run folder. Out: a checkpoint and its step, and what has changed since; or an error where
the job is another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.errors import CheckpointError, UsageError
from plait.job.job import Job
from plait.job.updates.optimizer_state import Updated, kept_by_name
from plait.options import Listener
from plait.run.checkpoint.state import TrainingState
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """A run that goes on."""

    step: int = 0
    """The step to continue with."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint says of the run that wrote it (`Task.kept`); nothing, of a run that begins."""

    def changes(self, job: Job, num_samples: int | None) -> list[str]:
        """What is no longer as it was, a sentence each; `num_samples` of the data are there now."""
        found, kept = [], self.kept
        if "num_samples" in kept and kept["num_samples"] != num_samples:
            before, now = (
                "a stream" if count is None else f"{count} samples"
                for count in (kept["num_samples"], num_samples)
            )
            found.append(
                f"the data is {now} and was {before}: epochs have another length from here on, and the samples that "
                "come next are not those that would have come."
            )
        for name in ("shuffle", "drop_last"):
            if kept.get(name, getattr(job, name)) != getattr(job, name):
                found.append(f"{name} is {getattr(job, name)} and was {kept[name]}: other samples come next.")
        ends = {"steps": job.steps, "epochs": job.epochs}
        if "steps" in kept and _length(kept) != _length(ends):
            found.append(f"the run ends with {_length(ends)}; it was begun with {_length(kept)}.")
        return found


def _length(of: Mapping[str, Any]) -> str:
    return f"steps={of['steps']}" if of["steps"] is not None else f"epochs={of['epochs']}"


def _check_optimizer(state: TrainingState, job: Job, checkpoint: Path) -> None:
    """Refuse state that the job's optimizer cannot have left: without what it keeps, or of another shape or kind."""
    updated = [
        Updated(name=name, shape=tuple(state.parameters[name].shape), dtype=state.parameters[name].dtype)
        for name in state.optimizer.tensors
    ]
    try:
        expected = kept_by_name(job.build_optimizer, updated)
    except Exception:  # the job has another optimizer, or other parameters: told where it is built
        return
    for name, kept in expected.items():
        found = state.optimizer.tensors[name]
        for key, own in kept.items():
            if not isinstance(own, Tensor):
                continue
            there = found.get(key)
            if (
                there is None
                or there.shape != own.shape
                or there.is_floating_point() != own.is_floating_point()
            ):
                has = "nothing" if there is None else f"{tuple(there.shape)} of {there.dtype}"
                raise CheckpointError(
                    f"{checkpoint}: the optimizer keeps {key!r} of {name!r} as {tuple(own.shape)} of {own.dtype}; the"
                    f" checkpoint has {has}",
                    fix="resume with the job and the checkpoint that were saved.",
                )


def continued_from(checkpoint: Path, job: Job) -> Continued:
    """Where it goes on; refuses a job under which it would not be the same run."""
    state = load_checkpoint(checkpoint)
    _check_optimizer(state, job, checkpoint)
    for name in ("seed", "batch"):
        before, now = state.extra.get(name), getattr(job, name)
        if before is not None and before != now:
            raise UsageError(
                f"the run was started with {name}={before}; the job now has {name}={now}, which gives other samples.",
                fix=f"use --set {name}={before}, or start a new run.",
            )
    return Continued(step=state.step, kept=state.extra)
