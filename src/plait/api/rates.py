"""`plait.find_lr`: which learning rate, by a short run whose rate grows from step to step.

In: a job and a plan. Out: the loss at every rate, and a suggestion. The run is an ordinary one under the plan, in a
folder that is gone afterwards; the model that it trains is thrown away. It ends where the loss has clearly left its
lowest value.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from plait.api.inputs.given import given_job
from plait.api.train import train
from plait.callbacks import Callback, StepDone, Stop, Watching
from plait.errors import SpoiledError, UsageError
from plait.files.scratch import scratch_folder
from plait.job.job import Job
from plait.options import Changes, Limits, Listener, Saving
from plait.plan.plan import Plan

_SMOOTHED = 0.9
"""What is left of an older loss in the mean that is looked at, from step to step."""
_GIVEN_UP = 4.0
"""A mean loss over so many times the lowest is the end; fastai's bound."""
_FIRST = 5
"""Steps that are not judged: their means are of few losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Losses by learning rate."""

    rates: tuple[float, ...]
    """Of the first group of parameters, step by step."""
    losses: tuple[float, ...]
    """Of each step, before its update."""
    means: tuple[float, ...]
    """Smoothed, by a mean that forgets."""
    steepest: float
    """Where the mean falls fastest: what to train with."""
    lowest: float
    """Where it is lowest: training with it is at the edge."""

    def picture(self) -> str:
        """The curve, as SVG."""
        from plait.report.rates_picture import rates_picture  # only who asks for it draws

        return rates_picture(self.rates, self.losses, self.means, self.steepest)


class _Watch(Callback):
    """Notes losses, and ends the run where they have left their lowest."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_step(self, event: StepDone) -> Stop | None:
        self.rates.append(event.lr)
        self.losses.append(event.loss)
        means = smoothed(self.losses)
        if len(means) > _FIRST and means[-1] > _GIVEN_UP * min(means):
            return Stop(reason="the loss has left its lowest")
        return None


def find_lr(
    job: Job | str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 100,
    changes: Changes = Changes(),
    device: str = "cpu",
    listener: Listener | None = None,
) -> Rates:
    """Train `job` for `steps` steps while its learning rate grows from `lowest` to `highest`, by equal factors.

    Groups of parameters keep the ratios of their rates. The rate to train with is `steepest` of what comes back.
    """
    if not 0 < lowest < highest or not math.isfinite(highest):
        raise UsageError(
            f"learning rates from {lowest:g} to {highest:g} do not grow.",
            fix="use --lowest 1e-6 --highest 10.",
        )
    if steps < 2 * _FIRST:
        raise UsageError(f"steps={steps} are too few for a curve.", fix=f"use {2 * _FIRST} or more.")
    given, of_plan = given_job(job, changes)
    if given.objectives:
        raise UsageError(
            "the job has several objectives, each with a learning rate of its own.",
            fix='look at one: plait.find_lr(job.only("NAME")).',
        )
    growth = (highest / lowest) ** (1 / (steps - 1))
    asked = replace(given.unmeasured(), schedule=lambda step: lowest * growth**step, steps=steps, epochs=None)
    watch = _Watch()
    # A loss that is no number any more is an end too: the rate is far over what the model bears.
    with scratch_folder() as folder, suppress(SpoiledError):
        train(
            asked, plan, ranks, changes=Changes(mesh=changes.mesh, settings=of_plan), out=folder / "run", device=device,
            saving=Saving(trace=False), limits=Limits(check=False),
            watching=Watching(callbacks=[watch], listener=listener, progress=False),
        )  # fmt: skip
    return rates_of(watch.rates, watch.losses)


def rates_of(rates: list[float], losses: list[float]) -> Rates:
    """What a curve says."""
    if len(losses) <= _FIRST:
        raise UsageError(
            f"the loss was no number after {len(losses)} steps, at a learning rate of {rates[-1] if rates else 0:g}.",
            fix="begin lower: --lowest 1e-8.",
        )
    means = smoothed(losses)
    at = min(range(_FIRST, len(means)), key=means.__getitem__)
    slopes = {
        i: (means[i + 1] - means[i - 1]) / math.log(rates[i + 1] / rates[i - 1])
        for i in range(1, max(at, 2))
        if i + 1 < len(means)
    }
    steepest = min(slopes, key=slopes.__getitem__)
    return Rates(
        rates=tuple(rates),
        losses=tuple(losses),
        means=tuple(means),
        steepest=rates[steepest],
        lowest=rates[at],
    )


def smoothed(losses: list[float]) -> list[float]:
    """Means that forget, each corrected for its short memory."""
    found, mean = [], 0.0
    for count, loss in enumerate(losses, 1):
        mean = _SMOOTHED * mean + (1 - _SMOOTHED) * loss
        found.append(mean / (1 - _SMOOTHED**count))
    return found
