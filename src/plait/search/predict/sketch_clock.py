"""Clocks of coarse actions: when the ranks of a pipeline work, and when units overlap with communication.

In: the actions of a schedule (the very lists that programs are compiled from) with their seconds; or units in the order
in which they run, with what each communicates. Out: times. Lanes are queues: compute, and communication beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.errors import ProgramError
from plait.program.stage.schedules.base import Action
from plait.program.stage.schedules.messages import Made, makes, needs


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """The actions of a schedule in an order in which none waits for a later one: made once, timed many times."""

    ranks: int
    kinds: tuple[Action, ...]
    """One action for all that take equally long: of one kind and stage, the first micro-batch and the others apart."""
    order: tuple[tuple[int, int, int, int], ...]
    """Each action: rank, which of `kinds`, the message that it waits for and the one that it sends (-1: none)."""
    num_messages: int


def course(actions: Sequence[Sequence[Action]], stages: int) -> Course:
    """Put the actions of all ranks in order; each waits for the message of the stage before or after it."""
    kinds: dict[tuple[str, int, bool], int] = {}
    first: list[Action] = []
    messages: dict[Made, int] = {}
    order: list[tuple[int, int, int, int]] = []
    position = [0] * len(actions)
    waiting = True
    while waiting:
        waiting, before = False, len(order)
        for rank, own in enumerate(actions):
            at = position[rank]
            while at < len(own):
                action = own[at]
                needed = needs(action, stages)
                reads = -1 if needed is None else messages.get(needed, -2)
                if reads == -2:
                    break
                key = (action.kind, action.stage, action.micro_batch > 0)
                if key not in kinds:
                    kinds[key] = len(first)
                    first.append(action)
                made, writes = makes(action), -1
                if made is not None:
                    messages[made] = writes = len(messages)
                order.append((rank, kinds[key], reads, writes))
                at += 1
            position[rank] = at
            waiting = waiting or at < len(own)
        if waiting and len(order) == before:
            raise ProgramError("the schedule deadlocks.")
    return Course(ranks=len(actions), kinds=tuple(first), order=tuple(order), num_messages=len(messages))


def course_times(run: Course, seconds: Callable[[Action], float], message_s: float) -> PipelineTimes:
    """When the ranks of a pipeline are done."""
    clock, busy = [0.0] * run.ranks, [0.0] * run.ranks
    arrives = [0.0] * run.num_messages
    taken = [seconds(action) for action in run.kinds]
    travel_s = message_s if run.ranks > 1 else 0.0
    for rank, kind, reads, writes in run.order:
        now = clock[rank]
        if reads >= 0 and arrives[reads] > now:
            now = arrives[reads]
        now += taken[kind]
        busy[rank] += taken[kind]
        clock[rank] = now
        if writes >= 0:
            arrives[writes] = now + travel_s
    return PipelineTimes(ends_s=tuple(clock), busy_s=tuple(busy))


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
