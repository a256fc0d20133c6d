"""The other tasks of a run, as the first one sees them, and how ranks are spread over all of them.

In: tasks that came, that were lost, that came back. Out: which ranks each has in the next round.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from plait.errors import PlaitError, RunError, UsageError
from plait.run.join.addresses import is_here
from plait.run.join.place import Place
from plait.run.start.tasks.trunk import Trunk
from plait.run.start.watch.failure import revive

DIFFERS_S = 5.0
"""For which a task of a run with another number of tasks may call: it can be what is left of an earlier start."""


@dataclass(kw_only=True, slots=True)
class Other:
    """Another task, as the first one sees it."""

    task: int
    trunk: Trunk
    host: str
    """As a person calls it."""
    clock_ns: int
    """What its clock lacks."""
    clock_error_ns: int
    """By how much that may be wrong."""
    facts: Mapping[str, Any] | None = None
    """What it is about to do; None: it has not come so far."""
    said: Mapping[str, Any] | None = None
    """What it says of a run folder, before it knows what to do; None: nothing yet, or it was answered."""
    has_brought: bool = False
    """Whether it has sent all that it was asked for."""
    error: Mapping[str, Any] | None = None
    """Why it cannot."""
    is_ready: bool = False
    has_heard: bool = False
    """Whether it knows the last step."""
    is_done: bool = False
    """Whether its ranks are gone and their files are here."""
    lost: str | None = None
    """How the connection ended."""
    is_apart: bool = False
    """Whether it does not see the run folder."""
    is_returning: bool = False
    """Whether it came while the run was under way, and waits to be taken in."""

    @property
    def is_beside(self) -> bool:
        """Whether it is on the host of task 0."""
        return is_here(self.trunk.socket.getpeername()[0])

    def failure(self, told: Mapping[str, Any]) -> PlaitError:
        """The error that it told of, in its name."""
        error = revive(told)
        error.what = f"task {self.task} on {self.host}: {error.what}"
        return error


@dataclass(kw_only=True, slots=True)
class Members:
    """All tasks."""

    place: Place
    others: dict[int, Other] = field(default_factory=dict)
    """By task; also those that are lost."""
    differing: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tasks that were started with another number of tasks, in words -> when they called first and last."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Is notified when one of them has told something new."""
    _room: dict[int, int] = field(default_factory=dict)
    """Ranks that each task can have, once some were lost."""
    _counts: dict[int, int] = field(default_factory=dict)
    """Ranks that each task has, once some were lost."""

    def present(self) -> list[Other]:
        """Those that the run counts on; one of them may have been lost a moment ago."""
        dropped = {task for task, room in self._room.items() if not room}
        return [o for t, o in sorted(self.others.items()) if t not in dropped and not o.is_returning]

    def came_by(self) -> list[str]:
        """The addresses of this host by which other hosts have come, the one that most use first; where there are none,
        those by which tasks beside this one have."""
        found = self.present()
        away = [other for other in found if not other.is_beside]
        counts = Counter(other.trunk.socket.getsockname()[0] for other in away or found)
        return [address for address, _ in counts.most_common()]

    def wait(self, is_over: Callable[[], bool], patience_s: float, late: Callable[[], UsageError]) -> None:
        """Wait for other tasks; an error where one is lost or says why it cannot, `late` where time is up."""
        deadline = time.monotonic() + patience_s
        with self.changed:
            while not is_over():
                for other in self.present():
                    if other.error is not None:
                        raise other.failure(other.error)
                    if other.lost is not None:
                        raise RunError(f"task {other.task} on {other.host} is gone: {other.lost}.")
                for told, (since, until) in self.differing.items():
                    if until - since > DIFFERS_S:
                        raise UsageError(
                            f"{told}, task 0 with {self.place.tasks}.",
                            fix="start all of them with the same number of tasks.",
                        )
                if time.monotonic() > deadline:
                    raise late()
                self.changed.wait(0.1)

    def await_end(self, patience_s: float, *, of_silent: bool) -> None:
        """Wait until the others' ranks are gone and their files are here, for so long; `of_silent`: also for tasks that
        say nothing."""
        deadline = time.monotonic() + patience_s
        with self.changed:
            while time.monotonic() < deadline:
                awaited = [other for other in self.present() if of_silent or not other.trunk.is_silent]
                if all(other.is_done or other.lost is not None for other in awaited):
                    return
                self.changed.wait(0.1)

    def refuse(self, task: object, tasks: object, host: str) -> dict[str, Any]:
        """The answer to a task that was started with another number of tasks."""
        told = f"task {task} on {host} was started with {tasks} tasks"
        now = time.monotonic()
        self.differing[told] = (self.differing.get(told, (now, now))[0], now)
        return {"refused": f"task 0 was started with {self.place.tasks} tasks.", "differs": True}

    def tell(self, head: dict[str, Any]) -> None:
        """All that are present hear it; those that cannot are found lost by whoever listens to them."""
        for other in self.present():
            with suppress(OSError):
                other.trunk.send(head)

    def hosts(self, address: str) -> list[dict[str, Any]]:
        """All tasks, for the run's records: where each is, and by how much its times in a trace may be off."""
        found = [{"task": 0, "host": socket.gethostname(), "address": address, "clock_error_s": 0.0}]
        for task, other in sorted(self.others.items()):
            where = other.trunk.socket.getpeername()[0]
            error_s = other.clock_error_ns / 1e9
            found.append({"task": task, "host": other.host, "address": where, "clock_error_s": error_s})
        return found

    def seats(self, ranks: int) -> dict[int, range]:
        """The ranks of each task."""
        counts = self._counts
        if sum(counts.values()) != ranks:
            counts = dict.fromkeys(range(self.place.tasks), self.place.ranks_each(ranks))
        found, start = {}, 0
        for task, count in sorted(counts.items()):
            found[task] = range(start, start + count)
            start += count
        return found

    def begin_without(self, ranks: int) -> int:
        """How many ranks, of so many that all tasks would have, those have that are there at the start."""
        each, here = self.place.ranks_each(ranks), self.place.tasks - self.place.absent
        self._room = {task: each if task < here else 0 for task in range(self.place.tasks)}
        return self.ranks_left

    def lose(self, ranks: int, lost: Collection[int]) -> int:
        """Of so many ranks these are lost; how many there can be now. Task 0, which has the run folder, keeps one."""
        seats = self.seats(ranks)
        room = self._room or {task: len(own) for task, own in seats.items()}
        for task, own in seats.items():
            other = self.others.get(task)
            gone = task > 0 and (other is None or other.lost is not None)
            room[task] = 0 if gone else room[task] - len(set(own) & set(lost))
        room[0] = max(1, room[0])
        self._room = room
        return self.ranks_left

    @property
    def ranks_left(self) -> int:
        """How many ranks there can be."""
        return sum(self._room.values())

    def spread(self, ranks: int) -> None:
        """Give so many ranks to the tasks that are left, the first ones first."""
        self._counts = {}
        for task, room in sorted(self._room.items()):
            self._counts[task] = min(room, ranks)
            ranks -= self._counts[task]
        assert not ranks, "more ranks than there is room for"

    def take_in(self) -> str:
        """Count on those that came back; who they are, in words."""
        usual = max(self._room.values())
        found = [o for o in self.others.values() if o.is_returning and o.is_ready and o.lost is None]
        for other in found:
            other.is_returning = False
            self._room[other.task] = usual
        return ", ".join(f"task {other.task} on {other.host}" for other in found)
