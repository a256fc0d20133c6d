"""The collectives of one rank with its peers in shared memory, in the order in which all of them start them.

In: what is to be done with which tensors. Out: tasks that are done, or an error that names the operation and the rank.
A task goes on from where it had to wait, so a caller may move it along between other things, wait for it, or leave it
to a thread. It never sums what differs between ranks: they compare what they are about to do first.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.errors import RunError
from plait.run.link.core import COMPARED_WORDS, DISAGREE, DONE, Core, Signature, make_signature
from plait.run.link.shared_memory import has_ended
from plait.run.link.steps import OPERATIONS, REDUCED, Rows

KINDS = (
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all",
    "all_reduce in shared memory", "reduce_scatter in shared memory", "all_gather in shared memory", "halo", "place",
)  # fmt: skip
"""What ranks may meet for, by its number in signatures."""
DTYPES = (
    *REDUCED, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Dtypes that ranks tell each other, by their number in signatures."""
_LOOK_S = 0.2
"""Between two looks whether the others are still alive: a death is told within a second."""


@dataclass(kw_only=True, slots=True)
class Task:
    """A collective of one rank, as far as it has come."""

    kind: str
    """One of `KINDS`."""
    rows: Rows
    given: Sequence[Tensor] = ()
    """Tensors that are read: contiguous, one for each register of what is given."""
    taken: Sequence[Tensor] = ()
    """Tensors that are written."""
    dtype: torch.dtype | None = None
    operation: int = -1
    root: int = -1
    num_bytes: int = 0
    """The size on which all ranks agree."""
    place: tuple[int, int, int] = (0, 0, 0)
    """Where this rank's tensor lies in its memory: offset and size of a region, and the byte in it."""
    then: "Callable[[Task], Task | None] | None" = None
    """What comes of it: told when it is done, and another task where it goes on."""
    row: int = 0
    base: int = -1
    number: int = -1
    signature: Signature | None = None
    registers: list[Tensor] = field(default_factory=list)
    is_done: bool = False
    """Whether it and all that came of it are done."""
    origin: "Task | None" = None
    """The task of which this one came."""
    told: "Callable[[BaseException | None], None] | None" = None
    """Who is told when it is done or has failed."""

    def describe(self) -> str:
        """For people."""
        return _told(self.kind, self.dtype, self.operation, self.root, self.num_bytes)


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
        self._count = 0
        self._base = 0
        self._uses = 0
        self._queue: deque[Task] = deque()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._waits_since = 0.0

    def start(self, task: Task) -> Task:
        """Put a task behind those that are under way."""
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
            self.progress(_LOOK_S)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._queue

    def progress(self, limit_s: float = 0.0) -> None:
        """Do what can be done now of the tasks that are under way; wait at most `limit_s` for another rank."""
        ended: list[Task] = []
        try:
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._work(limit_s, ended)
        except Exception as error:
            if self._error is None:
                self._error = error
            ended += self._queue
            self._queue.clear()
            raise
        finally:
            for task in ended:
                first = task.origin or task
                if first.told is not None:
                    first.told(None if first.is_done else self._error)

    def _work(self, limit_s: float, ended: list[Task]) -> None:
        while self._queue and self._advance(task := self._queue[0], limit_s):
            following = task.then(task) if task.then is not None else None
            if following is not None:
                following.origin = task.origin or task
                self._queue[0] = following
                continue
            self._queue.popleft()
            (task.origin or task).is_done = True
            ended.append(task)

    def _advance(self, task: Task, limit_s: float) -> bool:
        if task.base < 0:
            self._begin(task)
        assert task.signature is not None
        row = self._core.advance(task.rows, task.row, task.base, task.registers, task.signature, limit_s)
        if row == DONE:
            self._base += task.rows.posts
            self._uses += task.rows.uses
            self._waits_since = 0.0
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
        task.base, task.number = self._base, self._count
        self._count += 1
        dtype = DTYPES.index(task.dtype) if task.dtype in DTYPES else len(DTYPES)
        words = (
            task.number, KINDS.index(task.kind), dtype, task.operation + 1, task.root + 1,
            task.num_bytes, *task.place,
        )  # fmt: skip
        task.signature = make_signature(words)
        first, second = self._slots[self._uses % 2], self._slots[(self._uses + 1) % 2]
        filler = [first[0]] * (self.ranks - len(task.given))
        task.registers = [*first, *second, *task.given, *filler, *task.taken]

    def _look(self, task: Task) -> None:
        """Whether those that are missing still can come."""
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        wanted = task.base + task.rows.words[8 * task.row + 1]
        missing = [
            rank
            for rank in range(self.ranks)
            if rank != self.own and (self._core.counter(rank) - wanted) % 2**32 > 2**31
        ]
        for rank in missing:
            if has_ended(self._pids[rank]):
                raise ConnectionError(
                    f"{task.describe()}: the process of {self._names[rank]} (pid {self._pids[rank]}) is gone."
                )
        if missing and now - self._waits_since > self.timeout_s:
            who = " and ".join(self._names[rank] for rank in missing)
            raise ConnectionError(
                f"{task.describe()}: {who} did not come within {self.timeout_s:.0f} s: timed out."
            )

    def _disagreement(self, task: Task, other: int) -> RunError:
        number, kind, dtype, operation, root, num_bytes, *_ = self._core.signature(other, task.number)
        theirs = "another collective"
        if number == task.number and kind < len(KINDS):
            known = DTYPES[dtype] if dtype < len(DTYPES) else None
            theirs = _told(KINDS[kind], known, operation - 1, root - 1, num_bytes)
        return RunError(
            f"the ranks do not do the same: {self._names[self.own]} has {task.describe()}, "
            f"{self._names[other]} has {theirs} (their collective number {task.number}).",
            fix="let all ranks of a group call the same collectives in the same order, with tensors of one kind.",
        )


def _told(kind: str, dtype: torch.dtype | None, operation: int, root: int, num_bytes: int) -> str:
    known = [OPERATIONS[operation]] if operation >= 0 else []
    known += [str(dtype)] if dtype is not None else []
    how = f" ({', '.join(known)})" if known else ""
    toward = f" with root {root}" if root >= 0 else ""
    return f"{kind}{how} of {num_bytes:,} bytes{toward}"
