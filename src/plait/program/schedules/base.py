"""What a schedule is: for each rank of a pipeline, what it does, in order.

In: the number of ranks, of stages a rank, of micro-batches. Out: a list of actions per rank. Stages are numbered along
the model; stage s runs on rank s % ranks. Schedules know nothing of models, costs or messages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["forward", "backward", "input", "weight"]
"""`backward` is both of `input` (gradients of activations, sent on) and `weight` (gradients of parameters)."""


@dataclass(frozen=True, slots=True)
class Action:
    """One stage works on one micro-batch."""

    kind: ActionKind
    stage: int
    micro_batch: int


Schedule = Callable[[int, int, int], list[list[Action]]]
"""(ranks, stages a rank, micro-batches) -> the actions of each rank."""
