"""Averages of the weights, kept beside training.

Goes in: a job's `average`. Comes out: after which steps they are taken, and torch's own function that takes them. As
`torch.optim.swa_utils.AveragedModel`: the first average is a copy, and elements are averaged one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import swa_utils

from plait.errors import JobError
from plait.job.fields import Problem, is_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """An exponential moving average of the weights (EMA), or their mean over steps (SWA)."""

    kind: Literal["ema", "swa"] = "ema"
    """`ema`: decay * average + (1 - decay) * weights; `swa`: the mean of all that were taken."""
    decay: float = 0.999
    """Of `ema`."""
    start: int = 0
    """The first step, counted from 0, after which weights are taken."""
    every: int = 1
    """Steps from one time to the next."""
    buffers: bool = False
    """Whether buffers are averaged too; else, as counters always, they are those of the model when last taken."""
    update_bn: int = 0
    """Steps, from the job's first on, whose batches the averaged model sees before each evaluation and checkpoint, to
    make the statistics of batch norm anew, as `torch.optim.swa_utils.update_bn` does; 0: none."""
    evaluate: bool = True
    """Whether evaluations measure the averaged weights, once there are any."""

    def __post_init__(self) -> None:
        problems = average_problems(self)
        if problems:
            raise JobError(
                " ".join(f"average: {p.what}" for p in problems), fix=" ".join(p.fix for p in problems)
            )

    def is_due(self, step: int) -> bool:
        """Whether weights are taken after a step."""
        return step >= self.start and (step - self.start) % self.every == 0

    @property
    def function(self) -> Callable[..., Any]:
        """(averages, weights, how many were taken before) -> None; in place."""
        made: Any = swa_utils
        found: Callable[..., Any] = (
            made.get_ema_multi_avg_fn(self.decay) if self.kind == "ema" else made.get_swa_multi_avg_fn()
        )
        return found


def average_problems(average: Average) -> list[Problem]:
    """Everything wrong with it by itself."""
    found = []
    if average.kind not in ("ema", "swa"):
        found.append(Problem(what=f"kind is {average.kind!r}.", fix="use kind='ema' or kind='swa'."))
    if not isinstance(average.decay, int | float) or not 0 <= average.decay <= 1:
        found.append(Problem(what=f"decay is {average.decay!r}.", fix="give decay a number from 0 to 1."))
    for name, least in (("start", 0), ("every", 1), ("update_bn", 0)):
        value = getattr(average, name)
        if not is_whole(value) or value < least:
            found.append(Problem(what=f"{name} is {value!r}.", fix=f"give {name} a whole number >= {least}."))
    if average.buffers is True and average.update_bn:
        found.append(
            Problem(what="buffers are averaged, and made anew by update_bn.", fix="choose one of the two.")
        )
    for name in ("buffers", "evaluate"):
        if not isinstance(getattr(average, name), bool):
            found.append(
                Problem(what=f"{name} is {getattr(average, name)!r}.", fix=f"set {name} to True or False.")
            )
    return found
