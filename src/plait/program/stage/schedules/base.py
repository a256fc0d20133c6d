"""What a schedule is: for each rank of a pipeline, what it does, in order.

In: the number of ranks, of stages a rank, of micro-batches. Out: a list of actions per rank. Stages are numbered along
the model; stage s runs on rank s % ranks. Schedules know nothing of models or messages.

Every schedule computes the gradients of a stage's parameters in the order of the micro-batches, as one process does:
sums keep their order, so gradients keep their bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import PlanError

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """How long one stage takes for one micro-batch; only the ratios matter."""

    forward: float = 1.0
    input: float = 1.0
    """Gradients of activations."""
    weight: float = 1.0
    """Gradients of parameters."""


def one_stage_a_rank(schedule: str, stages_a_rank: int) -> None:
    """Refuse several stages a rank."""
    if stages_a_rank != 1:
        raise PlanError(
            f"schedule {schedule} has one stage a rank; the plan asks for {stages_a_rank}.",
            fix="use the schedule interleaved, or one stage a rank.",
        )


def peak_in_flight(actions: Sequence[Sequence[Action]]) -> list[int]:
    """For each rank, the most (stage, micro-batch) that are between their forward and their last gradient at once."""
    peaks = []
    for own in actions:
        now = most = 0
        for action in own:
            now += {"forward": 1, "input": 0, "backward": -1, "weight": -1}[action.kind]
            most = max(most, now)
        peaks.append(most)
    return peaks
