"""Clocks of coarse actions: when the ranks of a pipeline work, and when units overlap with communication.

In: the actions of a schedule (the very lists that programs are compiled from) with their seconds; or units in the order
in which they run, with what each communicates. Out: times. Lanes are queues: compute, and communication beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.errors import ProgramError
from plait.program.schedules.base import Action


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimes:
    """When each rank of a pipeline is done, and how long it worked."""

    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Until the last is done."""
        return max(self.ends_s)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks until the last is done."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


def pipeline_times(
    actions: Sequence[Sequence[Action]], stages: int, seconds: Callable[[Action], float], message_s: float
) -> PipelineTimes:
    """Run the actions of every rank in order; each waits for the message of the stage before or after it."""
    ranks = len(actions)
    position, clock, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    arrives: dict[tuple[str, int, int], float] = {}
    travel_s = message_s if ranks > 1 else 0.0
    waiting = True
    while waiting:
        waiting, moved = False, False
        for rank, own in enumerate(actions):
            at = position[rank]
            while at < len(own):
                action = own[at]
                start = _ready(action, stages, arrives)
                if start is None:
                    break
                taken = seconds(action)
                clock[rank] = max(clock[rank], start) + taken
                busy[rank] += taken
                made = "forward" if action.kind == "forward" else "input"
                if action.kind != "weight":
                    arrives[made, action.stage, action.micro_batch] = clock[rank] + travel_s
                at += 1
            moved = moved or at > position[rank]
            position[rank] = at
            waiting = waiting or at < len(own)
        if waiting and not moved:
            raise ProgramError("the schedule deadlocks.")
    return PipelineTimes(ends_s=tuple(clock), busy_s=tuple(busy))


def _ready(action: Action, stages: int, arrives: dict[tuple[str, int, int], float]) -> float | None:
    if action.kind == "forward":
        return arrives.get(("forward", action.stage - 1, action.micro_batch)) if action.stage else 0.0
    if action.kind == "weight" or action.stage == stages - 1:
        return 0.0
    return arrives.get(("input", action.stage + 1, action.micro_batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """One unit on two lanes."""

    compute_s: float
    before_s: float = 0.0
    """Communication that must be done before it: its parameters are gathered, while the one before it computes."""
    after_s: float = 0.0
    """Communication that starts when it is done: its gradients are reduced."""


def overlapped(units: Sequence[Overlap], ahead: int = 1) -> tuple[float, float]:
    """When the last unit has computed and when the last communication is done; gathers run `ahead` units early."""
    compute = lane = 0.0
    started = [0.0]
    for index, unit in enumerate(units):
        if unit.before_s:
            lane = max(lane, started[max(0, index - ahead)]) + unit.before_s
            compute = max(compute, lane)
        started.append(compute)
        compute += unit.compute_s
        if unit.after_s:
            lane = max(lane, compute) + unit.after_s
    return compute, max(compute, lane)
