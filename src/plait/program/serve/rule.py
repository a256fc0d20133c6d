"""When a server applies an update, and whose request for weights it may answer: pure logic, no tensors.

In: who has pushed the gradients of which step, who asks for weights, who has left. Out: the next update that is due,
and staleness as it was measured. `Clocked` is server-sync and server-stale: one update a step, of all workers.
`AsTheyCome` is server-async: every push is an update.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from plait.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """An update that can be applied."""

    step: int
    """Of the job, for its learning rate."""
    workers: tuple[int, ...]
    """Whose gradients it sums, in this order."""


class Rule(Protocol):
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

    @property
    def steps(self) -> int:
        """Steps of the job that are done."""
        return self._start + self.applied

    def push(self, worker: int, step: int) -> None:
        """All gradients of a worker's step are there."""
        assert step == self._pushed[worker], (worker, step, self._pushed)
        self._pushed[worker] = step + 1

    def due(self) -> Due | None:
        """The update of the next step, once everybody who is still there has pushed."""
        there = tuple(worker for worker, pushed in enumerate(self._pushed) if pushed > self.steps)
        if not there or any(worker not in there for worker in self._active):
            return None
        return Due(step=self.steps, workers=there)

    def done(self) -> None:
        """The update was applied."""
        self.applied += 1

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
        self._active.discard(worker)


class AsTheyCome:
    """Every worker's push is an update of its own."""

    def __init__(self, workers: int, start: int) -> None:
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


def rule_of(plan: Plan, start: int) -> Rule:
    """The rule of a plan whose weights are on servers, from step `start` on."""
    if plan.sync.rule == "server-async":
        return AsTheyCome(plan.mesh.size, start)
    return Clocked(plan.mesh.size, plan.sync.staleness, start)


def histogram(counts: Collection[Counter[int]]) -> dict[str, int]:
    """Counts by staleness, of several servers, as JSON."""
    total = sum(counts, Counter[int]())
    return {str(age): total[age] for age in sorted(total)}
