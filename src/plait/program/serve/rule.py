"""When a server applies an update, and whose request for weights it may answer: pure logic, no tensors.

In: who has sent all of a contribution (gradients of a step, or weights), who asks for weights, who has left. Out: the
next update that is due, and staleness as it was measured. The server, the serial interpreter and the simulator ask the
same rule: `Clocked` makes one update a step, of all workers; `AsTheyCome` one of every contribution; `InTurn` too, but
of one worker after the other.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from plait.program.instructions import Serve


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """An update that can be applied."""

    step: int
    """Of the job, for its learning rate."""
    workers: tuple[int, ...]
    """Whose gradients it sums, in this order."""


class ServerRule(Protocol):
    """What a server asks."""

    staleness: Counter[int]
    """How often weights, or gradients, were so many updates old."""
    applied: int
    """Updates so far."""

    def push(self, worker: int, step: int) -> None:
        """All gradients of a worker's step are there."""

    def due(self) -> Due | None:
        """The update to apply now; it is applied before this is asked again."""

    def done(self) -> None:
        """The update was applied."""

    def drop(self) -> None:
        """The update cannot be applied: another server will never have its part of it."""

    def may_pull(self, worker: int, step: int) -> bool:
        """Whether weights are new enough for a worker's step."""

    def pulled(self, worker: int, step: int) -> None:
        """A worker was given weights for a step."""

    def leave(self, worker: int) -> None:
        """Nothing more comes from a worker."""

    @property
    def steps(self) -> int:
        """Steps of the job that are done."""


class Clocked:
    """One update a step, of all workers; weights for step c hold at least the updates of the steps before c - bound."""

    def __init__(self, workers: int, bound: int, start: int) -> None:
        self.staleness: Counter[int] = Counter()
        self.applied = 0
        self._bound = bound
        self._start = start
        self._pushed = [start] * workers
        self._active = set(range(workers))
        self._missing = workers
        """Of those, who have not pushed the next update's gradients: kept, for this is asked after every message."""

    @property
    def steps(self) -> int:
        """Steps of the job that are done."""
        return self._start + self.applied

    def push(self, worker: int, step: int) -> None:
        """All gradients of a worker's step are there."""
        assert step == self._pushed[worker], (worker, step, self._pushed)
        self._missing -= step == self.steps and worker in self._active
        self._pushed[worker] = step + 1

    def due(self) -> Due | None:
        """The update of the next step, once everybody who is still there has pushed."""
        if self._missing:
            return None
        there = tuple(worker for worker, pushed in enumerate(self._pushed) if pushed > self.steps)
        return Due(step=self.steps, workers=there) if there else None

    def done(self) -> None:
        """The update was applied."""
        self.applied += 1
        self._missing = sum(self._pushed[worker] <= self.steps for worker in self._active)

    def drop(self) -> None:
        """Never asked for: every server sums what it has of a step."""
        raise AssertionError("every server applies every step")

    def may_pull(self, worker: int, step: int) -> bool:
        """Whether weights are new enough for a worker's step."""
        return self.steps >= step - self._bound

    def pulled(self, worker: int, step: int) -> None:
        """A worker was given weights for a step."""
        self.staleness[max(0, step - self.steps)] += 1

    def leave(self, worker: int) -> None:
        """Nothing more comes from a worker."""
        if worker in self._active:
            self._active.remove(worker)
            self._missing -= self._pushed[worker] <= self.steps


class AsTheyCome:
    """Every worker's push is an update of its own."""

    def __init__(self, workers: int, start: int, *, answers: bool = False) -> None:
        """`answers`: with each update its worker is given what was there before it, and need not ask."""
        self._answers = answers
        self.staleness: Counter[int] = Counter()
        self.applied = 0
        self._workers = workers
        self._start = start
        self._seen = [0] * workers
        self._waiting: deque[Due] = deque()

    @property
    def steps(self) -> int:
        """Steps of the job that are done: as many updates as there are workers make one."""
        return self._start + self.applied // self._workers

    def push(self, worker: int, step: int) -> None:
        """All gradients of a worker's step are there."""
        self._waiting.append(Due(step=step, workers=(worker,)))

    def due(self) -> Due | None:
        """The gradients that came first."""
        return self._waiting[0] if self._waiting else None

    def done(self) -> None:
        """The update was applied: how many came between the weights that it was computed on and it."""
        (worker,) = self._waiting.popleft().workers
        self.staleness[self.applied - self._seen[worker]] += 1
        self.applied += 1
        if self._answers:
            self._seen[worker] = self.applied

    def drop(self) -> None:
        """Pass over the update."""
        self._waiting.popleft()

    def may_pull(self, worker: int, step: int) -> bool:
        """Nobody waits for others; a worker sees what it has pushed itself."""
        return all(worker not in due.workers for due in self._waiting)

    def pulled(self, worker: int, step: int) -> None:
        """A worker was given weights."""
        self._seen[worker] = self.applied

    def leave(self, worker: int) -> None:
        """Nobody waits for anybody."""


class InTurn:
    """One worker's contribution after the other's, always in the same order; who has left has no turn."""

    def __init__(self, workers: int, start: int) -> None:
        self.staleness: Counter[int] = Counter()
        self.applied = 0
        self._start = start
        self._next = 0
        self._seen = [0] * workers
        self._waiting: list[deque[int]] = [deque() for _ in range(workers)]
        self._gone: set[int] = set()

    @property
    def steps(self) -> int:
        """Steps of the job that are done: as many updates as there are workers make one."""
        return self._start + self.applied // len(self._waiting)

    def push(self, worker: int, step: int) -> None:
        """All that a worker contributes is there."""
        self._waiting[worker].append(step)

    def due(self) -> Due | None:
        """That of the worker whose turn it is."""
        waiting = self._waiting[self._next]
        return Due(step=waiting[0], workers=(self._next,)) if waiting else None

    def done(self) -> None:
        """It was applied: how many of others came since the worker's last one."""
        self._waiting[self._next].popleft()
        self.staleness[self.applied - self._seen[self._next]] += 1
        self.applied += 1
        self._seen[self._next] = self.applied
        self._pass_on(1)

    def drop(self) -> None:
        """Never asked for: there is one server."""
        raise AssertionError("one rank has all of the center")

    def may_pull(self, worker: int, step: int) -> bool:
        """What is only looked at is as it is."""
        return True

    def pulled(self, worker: int, step: int) -> None:
        """Nothing comes of it."""

    def leave(self, worker: int) -> None:
        """Its turn, once all that it has sent is in, goes to the next one."""
        self._gone.add(worker)
        self._pass_on(0)

    def _pass_on(self, by: int) -> None:
        count = len(self._waiting)
        for ahead in range(by, by + count):
            worker = (self._next + ahead) % count
            if worker not in self._gone or self._waiting[worker]:
                self._next = worker
                return


def rule_of(serve: Serve, workers: int, start: int) -> ServerRule:
    """The rule of a server, from step `start` on."""
    match serve.order:
        case "step":
            return Clocked(workers, serve.bound, start)
        case "arrival":
            return AsTheyCome(workers, start, answers="exchange" in serve.handlers)
        case "turn":
            return InTurn(workers, start)


def histogram(counts: Collection[Counter[int]]) -> dict[str, int]:
    """Counts by staleness, of several servers, as JSON."""
    total = sum(counts, Counter[int]())
    return {str(age): total[age] for age in sorted(total)}
