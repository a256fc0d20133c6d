"""Measure the model on held-out data, all ranks together; decide when training is done.

In: the model, the job's evaluation data. Out: metrics over all of it, each sample counted once, the same on
every rank.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from plait.errors import CheckpointError, UsageError
from plait.files.document import Document, Format
from plait.files.shape import shaped
from plait.job.data.source import Source, Stream
from plait.job.data.workers import in_order
from plait.job.job import Job, Until
from plait.job.order import split
from plait.job.reading import total_and_weight
from plait.plan.plan import Plan
from plait.run.hold.state import ModelState

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Saved(msgspec.Struct):
    best: float | None
    since_best: _Count
    kept: float | None
    kept_step: _Count | None


_FORMAT = Format(noun="progress", error=CheckpointError, fix="take another checkpoint.")
Sum = Callable[[Tensor], Tensor]
"""Adds a tensor up over all ranks."""


def evaluate(
    state: ModelState, source: Source, rank: int, ranks: int, add_up: Sum, *, alike: bool = False
) -> dict[str, float]:
    """`loss` and the job's metrics over `source`.

    `alike`: every rank runs the model equally often, if need be on a sample that it does not count.
    """
    job = state.job
    names = job.measured
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    was_training = state.model.training
    state.model.eval()
    try:
        with torch.no_grad(), state.job.autocast(state.device.type):
            for count, fetched in _batches(source, job, rank, ranks, alike):
                batch = state.placed(fetched)
                found = _measure(job, state, batch, max(count, 1))
                if not count:
                    continue
                for index, (total, weight) in enumerate(found):
                    sums[index] += torch.tensor([float(total), float(weight)], dtype=torch.float64)
    finally:
        state.model.train(was_training)
    sums = add_up(sums)
    return {name: float(total / weight) for name, (total, weight) in zip(names, sums, strict=True)}


def _batches(source: Source, job: Job, rank: int, ranks: int, alike: bool) -> Iterator[tuple[int, Any]]:
    """This rank's samples with their number, `batch` at a time over all ranks; of a stream, its part of every batch.

    `alike`: ranks that have fewer get a sample of others, as 0 samples.
    """
    if isinstance(source, Stream):
        samples = source.samples(0)
        while chunk := list(itertools.islice(samples, job.batch)):
            sizes = split(len(chunk), ranks)
            own = chunk[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
            if own or alike:
                yield len(own), source.collate(own or chunk[:1])
        return
    assert source.num_samples is not None
    sizes = split(source.num_samples, ranks)
    first, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    per_rank = max(1, job.batch // ranks)
    parts = [torch.arange(start, min(start + per_rank, end)) for start in range(first, end, per_rank)]
    counts = [len(ids) for ids in parts]
    if alike:
        counts += [0] * (-(-max(sizes) // per_rank) - len(parts))
        parts += [torch.arange(1)] * (len(counts) - len(parts))
    read = lambda ids: (source.fetch(ids), source.news())  # noqa: E731
    with contextlib.closing(in_order(read, parts, job.workers, job.prefetch)) as batches:
        for count, (batch, damaged) in zip(counts, batches, strict=True):
            if source.damage is not None and count:
                source.damage.add(damaged)
            yield count, batch


def _measure(job: Job, state: ModelState, batch: Any, count: int) -> list[tuple[Any, Any]]:
    measured: dict[str, Any] = job.measures_of(state.model, batch)
    found = []
    for name, value in measured.items():
        if not isinstance(value, Tensor):
            found.append(value)
        elif name == "loss":
            found.append(total_and_weight(job, batch, count, value))
        else:
            found.append((value * count, count))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """A metric, and which way is better."""

    metric: str
    mode: str

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far."""
        sign = 1.0 if self.mode == "max" else -1.0
        return best is None or math.isnan(best) or sign * value > sign * best


_FALLS = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer", "bpc", "nll")
"""In the name of a metric that is better when it is smaller."""


def aim_of(text: str, job: Job, option: str = "--keep-best") -> Aim:
    """What `keep_best` means: `accuracy`, `max:accuracy`, `min:perplexity`; refused where it is not measured."""
    mode, _, metric = text.rpartition(":")
    names = ["loss", *(job.metrics or {})]
    if job.evaluate is None:
        raise UsageError(f"{option} {text}: the job has no evaluation data.", fix="give Job(evaluate=...).")
    if metric not in names or mode not in ("", "min", "max"):
        raise UsageError(
            f"{option} {text} is not a metric of this job.",
            fix=f"use one of {', '.join(names)}, or min:NAME.",
        )
    if not mode and job.until is not None and job.until.metric == metric:
        mode = job.until.mode
    if not mode:
        mode = "min" if any(word in metric.lower().split("_") for word in _FALLS) else "max"
    return Aim(metric=metric, mode=mode)


def check_keep_best(text: str | None, job: Job, plan: Plan) -> None:
    """Refuse a metric that the job does not measure, and plans under which nothing measured is what can be saved."""
    if text is None:
        return
    aim_of(text, job)
    if not plan.agreement.marches:
        raise UsageError(
            f"--keep-best {text}: under {plan.name} the weights go on changing while they are measured, so the best"
            " ones cannot be kept.",
            fix="use a plan that marches in step, or --keep 10 and choose by metrics.jsonl.",
        )


class Kept:
    """Remembers which checkpoint measured best."""

    def __init__(self, aim: Aim | None) -> None:
        self.aim = aim
        self.best: float | None = None
        self.step: int | None = None
        """Steps done in it."""

    def take(self, measured: dict[str, float], steps_done: int) -> bool:
        """Whether these measurements are the best so far."""
        if self.aim is None or not self.aim.improves(measured[self.aim.metric], self.best):
            return False
        self.best, self.step = measured[self.aim.metric], steps_done
        return True

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"kept": self.best, "kept_step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        found = _saved(state)
        self.best, self.step = found.kept, found.kept_step


class Progress:
    """Remembers evaluations to tell when the job's `until` is met."""

    def __init__(self, until: Until | None) -> None:
        self.until = until
        self.best: float | None = None
        self.since_best = 0

    def reached(self, measured: dict[str, float]) -> str | None:
        """Why training should stop after these measurements; None: it should not."""
        until = self.until
        if until is None or until.metric not in measured:
            return None
        value = measured[until.metric]
        sign = 1.0 if until.mode == "max" else -1.0
        if Aim(metric=until.metric, mode=until.mode).improves(value, self.best):
            self.best, self.since_best = value, 0
        else:
            self.since_best += 1
        if until.target is not None and sign * value >= sign * until.target:
            return f"{until.metric} reached {value:.4g} (target {until.target:.4g})"
        if until.patience is not None and self.since_best >= until.patience:
            return f"{until.metric} has not improved on {self.best:.4g} for {until.patience} evaluations"
        return None

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"best": self.best, "since_best": self.since_best}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        found = _saved(state)
        self.best, self.since_best = found.best, found.since_best


def _saved(state: Any) -> _Saved:
    """Of a run that never measured, nothing."""
    if state == {}:
        return _Saved(best=None, since_best=0, kept=None, kept_step=None)
    return shaped(Document(values=state, where="the saved progress"), _Saved, _FORMAT)
