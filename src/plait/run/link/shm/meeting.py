"""The collectives of one rank with its peers in shared memory, in the order in which all of them start them.

In: what is to be done with which tensors. Out: tasks that are done, or an error that names the operation and the rank.
A rank tells what it is about to do when it starts a task, so others can do their part of it. A task goes on from where
it had to wait, so a caller may move it along between other things, wait for it, or leave it to a thread. It never sums
what differs between ranks: they compare what they are about to do first.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from plait.errors import RunError
from plait.run.link.shm.core import COMPARED_WORDS, DISAGREE, DONE, RING, Core, make_signature
from plait.run.link.shm.memory import has_ended
from plait.run.link.shm.rows import COME, ROW
from plait.run.link.shm.task import DTYPES, KINDS, SAME_FIX, Task, told

LOOK_S = 0.2
"""Between two looks whether the others are still alive: a death is told within a second."""
_BEHIND_S = 0.001
"""Between two looks of a rank that is a whole ring of collectives ahead of another."""


class Meeting:
    """One group of ranks, seen from one of them."""

    def __init__(
        self,
        core: Core,
        slots: Sequence[Sequence[Tensor]],
        own: int,
        names: Sequence[str],
        pids: Sequence[int],
        timeout_s: float,
    ) -> None:
        """`slots`: two a rank; `names` of the ranks, for errors."""
        self.ranks, self.own = len(slots), own
        self.timeout_s = timeout_s
        self._core = core
        self._slots = [[own[turn] for own in slots] for turn in (0, 1)]
        self._names, self._pids = names, pids
        self._count = self._announced = 0
        self._base = 0
        self._uses = 0
        self._left: deque[int] = deque(maxlen=RING)
        """By what counter a rank has left each of the last collectives: the first post of the one after it."""
        self._done = 0
        self._queue: deque[Task] = deque()
        self._settling: deque[Task] = deque()
        """Tasks of which this rank has done its part, and others may not."""
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._waits_since = 0.0
        self._culprit = own

    def start(self, task: Task) -> Task:
        """Put a task behind those that are under way."""
        with self._starting:
            task.number, self._count = self._count, self._count + 1
            self._queue.append(task)
        return task

    def places(self, task: Task) -> list[tuple[int, int, int]]:
        """Where every rank's tensor lies, once they have met."""
        found = [self._core.signature(rank, task.number) for rank in range(self.ranks)]
        return [
            (words[COMPARED_WORDS], words[COMPARED_WORDS + 1], words[COMPARED_WORDS + 2]) for words in found
        ]

    def finish(self, task: Task) -> None:
        """Wait for a task."""
        while not task.is_done:
            self.progress(LOOK_S, task)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._queue and not self._settling

    def progress(self, limit_s: float = 0.0, wanted: Task | None = None) -> None:
        """Do what can be done now of the tasks that are under way; wait at most `limit_s`, for `wanted` or the next."""
        ended: list[Task] = []
        if not self._lock.acquire(blocking=limit_s > 0):
            return  # another thread is at it
        try:
            if self._error is not None:
                raise self._error
            self._work(ended)
            if limit_s > 0 and not (wanted.is_done if wanted is not None else self.is_idle):
                self._wait(limit_s, wanted, ended)
        except Exception as error:
            if self._error is None:
                self._error = error
                self._core.give_up(self._culprit)
            ended += (*self._settling, *self._queue)
            self._settling.clear()
            self._queue.clear()
            raise
        finally:
            self._lock.release()
            for task in ended:
                tell, task.first.told = (
                    task.first.told,
                    None,
                )  # so that nothing keeps the tensors of what is done
                if tell is not None:
                    tell(None if task.first.is_done else self._error)

    def give_up(self, error: BaseException) -> None:
        """Let the others know that this rank does not go on, for another reason than what it waits for here."""
        self._error = self._error or error
        self._core.give_up(self.own)

    def look(self) -> None:
        """An error where somebody who is missing cannot come any more, or took too long."""
        if self._settling:
            self._look(self._settling[0])
        elif self._queue:
            self._look(self._queue[0])

    def _work(self, ended: list[Task]) -> None:
        """Everything that needs nobody who is not there."""
        self._announce()
        while self._queue and self._advance(self._queue[0], 0.0, ended):
            self._announce()
        while self._settling and self._settle(self._settling[0], 0.0, ended):
            pass

    def _wait(self, limit_s: float, wanted: Task | None, ended: list[Task]) -> None:
        if self._settling and (wanted is None or not self._queue or wanted.number < self._queue[0].number):
            self._settle(self._settling[0], limit_s, ended)
        elif self._queue:
            self._advance(self._queue[0], limit_s, ended)

    def _announce(self) -> None:
        """Tell of tasks that were started, as far as all others have done those whose places in the ring they take."""
        while self._announced < self._done + len(self._queue):
            if self._announced >= RING:
                old = self._announced - RING
                if old >= self._done or self._behind(self._left[old - self._done + len(self._left)]):
                    return
            self._sign(self._queue[self._announced - self._done])

    def _sign(self, task: Task) -> None:
        dtype = DTYPES.index(task.dtype) if task.dtype in DTYPES else len(DTYPES)
        words = (
            task.number, KINDS.index(task.kind), dtype, task.operation + 1, task.root + 1,
            task.num_bytes, *task.place,
        )  # fmt: skip
        task.signature = make_signature(words)
        self._core.announce(task.signature, rings=task.rows.posts == 0)
        self._announced += 1

    def _advance(self, task: Task, limit_s: float, ended: list[Task]) -> bool:
        """This rank's part of the task that is next; whether it is done with it."""
        if task.number >= self._announced:  # others are a whole ring behind
            if limit_s > 0:
                time.sleep(_BEHIND_S)
                self._look(task)
            return False
        if task.base < 0:
            self._begin(task)
        if not self._run(task, task.rows.count - (not task.rows.is_settled), limit_s):
            return False
        self._base += task.rows.posts
        self._uses += task.rows.uses
        if task.rows.is_settled:
            following = task.then(task) if task.then is not None else None
            if following is not None:
                following.origin, following.number = task.first, task.number
                self._queue[0] = following
                return True
            task.first.is_done = True
            ended.append(task)
        else:
            self._settling.append(task)
        self._queue.popleft()
        self._left.append(self._base + 1)
        self._done += 1
        return True

    def _settle(self, task: Task, limit_s: float, ended: list[Task]) -> bool:
        if not self._run(task, task.rows.count, limit_s):
            return False
        self._settling.popleft()
        if task.then is not None:
            task.then(task)
        task.first.is_done = True
        ended.append(task)
        return True

    def _run(self, task: Task, count: int, limit_s: float) -> bool:
        signature = task.first.signature
        assert signature is not None
        row = self._core.advance(task.rows, task.row, task.base, count, task.registers, signature, limit_s)
        if row == DONE:
            task.row, self._waits_since = count, 0.0
            return True
        if row <= DISAGREE:
            raise self._disagreement(task, DISAGREE - row)
        if row != task.row:
            task.row, self._waits_since = row, 0.0
        elif limit_s > 0:
            self._look(task)
        return False

    def _begin(self, task: Task) -> None:
        """Give a task its turn: it is known now which slots it uses."""
        task.base = self._base
        first, second = self._slots[self._uses % 2], self._slots[(self._uses + 1) % 2]
        filler = [first[0]] * (self.ranks - len(task.given))
        task.registers = [*first, *second, *task.given, *filler, *task.taken]

    def _look(self, task: Task) -> None:
        """Whether those that are missing still can come."""
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        for rank in (missing := self._missing(task)):
            announced = self._core.has_come(rank, task.number + 1, announced=True)
            if announced and self._differs(task, rank):
                raise self._disagreement(task, rank)
            culprit = self._core.given_up(rank)
            if culprit is not None:
                self._culprit = culprit
                because = f" because of {self._names[culprit]}" if culprit not in (rank, self.own) else ""
                raise ConnectionError(f"{task.describe()}: {self._names[rank]} gave up{because}.")
            if has_ended(self._pids[rank]):
                self._culprit = rank
                raise ConnectionError(
                    f"{task.describe()}: the process of {self._names[rank]} (pid {self._pids[rank]}) is gone."
                )
        if missing and now - self._waits_since > self.timeout_s:
            who = " and ".join(self._names[rank] for rank in missing)
            raise ConnectionError(
                f"{task.describe()}: {who} did not come within {self.timeout_s:.0f} s: timed out."
            )

    def _missing(self, task: Task) -> list[int]:
        """For whom a task waits."""
        if task.base < 0:  # for a place in the ring
            return self._behind(self._left[0])
        kind, count = task.rows.words[ROW * task.row : ROW * task.row + 2]
        if kind == COME:
            return self._behind(task.number + 1, announced=True)
        return self._behind(task.base + count)

    def _behind(self, count: int, *, announced: bool = False) -> list[int]:
        """Who has not come so far."""
        return [
            rank
            for rank in range(self.ranks)
            if rank != self.own and not self._core.has_come(rank, count, announced=announced)
        ]

    def _differs(self, task: Task, rank: int) -> bool:
        own, theirs = (self._core.signature(r, task.number)[:COMPARED_WORDS] for r in (self.own, rank))
        return theirs[0] == task.number and own != theirs

    def _disagreement(self, task: Task, other: int) -> RunError:
        number, kind, dtype, operation, root, num_bytes, *_ = self._core.signature(other, task.number)
        theirs = "another collective"
        if number == task.number and kind < len(KINDS):
            known = DTYPES[dtype] if dtype < len(DTYPES) else None
            theirs = told(KINDS[kind], known, operation - 1, root - 1, num_bytes)
        return RunError(
            f"the ranks do not do the same: {self._names[self.own]} has {task.describe()}, "
            f"{self._names[other]} has {theirs} (their collective number {task.number}).",
            fix=SAME_FIX,
        )
