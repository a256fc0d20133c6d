"""What must not go unseen after a step: a loss that is no number or jumps, weights that differ where they must not.

In: each step's loss; the ranks' weights every so many steps and before each checkpoint. Out: nothing, or a
`SpoiledError`: what is done about it (stop, go back, leave the step out) is decided by whoever started the ranks.
"""

import math
from collections import defaultdict, deque
from statistics import median

from plait.errors import SpoiledError
from plait.job.data.share import LoadedStep
from plait.plan.plan import Plan
from plait.run.hold.replicas import compare_replicas
from plait.run.hold.state import ModelState

_WINDOW = 32
"""Losses that a new one is held against."""
_FEW = 8
"""With fewer nothing is called a jump."""


class Guard:
    """Watches one rank; all ranks must have one, for they meet in it."""

    def __init__(
        self, plan: Plan, ranks: int, state: ModelState, *, compare_every: int, spike: float | None
    ) -> None:
        agreement = plan.agreement
        self._has_replicas = ranks > 1 and agreement.sums
        self._state = state
        self._compare_every = compare_every
        self._spike = spike
        self._losses: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        """By objective."""
        self._compared = -1

    def check_loss(self, loss: float, loaded: LoadedStep) -> None:
        """An error where the loss is not finite, or over `spike` times what it was lately."""
        lately = self._losses[self._state.job.turn(loaded.step).objective]
        usual = median(lately) if len(lately) >= _FEW else None
        lately.append(loss)
        where = f"at step {loaded.step + 1} (epoch {loaded.epoch})"
        if not math.isfinite(loss):
            told = f"the loss is {loss} {where}."
        elif self._spike is not None and usual is not None and loss > self._spike * usual > 0:
            told = f"the loss jumped to {loss:.4g} {where}; lately it was {usual:.4g}."
        else:
            return
        raise SpoiledError(
            told,
            step=loaded.step,
            cause="loss",
            fix="lower the learning rate, set clip_norm, or check the data for NaN; where workers march in step, "
            "--on-bad-loss back or skip goes on from the last checkpoint.",
        )

    def is_due(self, step: int) -> bool:
        """Whether weights are compared after this step, saved or not."""
        return self._has_replicas and self._compare_every > 0 and (step + 1) % self._compare_every == 0

    def compare(self, step: int) -> None:
        """Compare the weights of all ranks after a step, once."""
        if not self._has_replicas or self._compared == step:
            return
        self._compared = step
        layout = self._state.holding.layout if self._state.holding is not None else None
        compare_replicas(self._state.parameters, self._state.parameter_names, layout, step)
