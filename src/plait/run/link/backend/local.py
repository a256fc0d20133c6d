"""How the ranks of a group of `plait_shm` that are processes of one host do what torch asks of them.

In: their memory. Out: collectives, works and messages. What the caller waits for at once is done in its own thread;
the rest by a thread in the background.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.run.link.backend.messages import Messages
from plait.run.link.backend.work import Progress, ShmWork
from plait.run.link.shm.bell import Bells
from plait.run.link.shm.collectives import Collectives, Then
from plait.run.link.shm.core import make_core
from plait.run.link.shm.meeting import Meeting
from plait.run.link.shm.memory import Arena, Region

_INLINE_BYTES = 1 << 15
"""Up to this size a collective that need not be waited for is done at once where all others have come."""


class GroupCollectives(Protocol):
    """What a rank may ask of its group, on flat tensors: see `Collectives`. Each gives something for `Ways.work`."""

    def barrier(self) -> Any: ...
    def all_reduce(self, flat: Tensor, operation: str = ..., then: Then | None = ...) -> Any: ...
    def reduce(
        self, flat: Tensor, out: Tensor, root: int, operation: str = ..., then: Then | None = ...
    ) -> Any: ...
    def broadcast(self, flat: Tensor, root: int, then: Then | None = ...) -> Any: ...
    def all_gather(
        self, outs: Sequence[Tensor], flat: Tensor, root: int = ..., then: Then | None = ...
    ) -> Any: ...
    def reduce_scatter(
        self, out: Tensor, pieces: Sequence[Tensor], operation: str = ..., then: Then | None = ...
    ) -> Any: ...
    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int, then: Then | None = ...) -> Any: ...
    def all_to_all(
        self, outs: Sequence[Tensor], pieces: Sequence[Tensor], then: Then | None = ...
    ) -> Any: ...


class Ways(Protocol):
    """How the ranks of one group reach each other."""

    @property
    def collectives(self) -> GroupCollectives:
        """Those of this rank."""

    def work(self, started: Any, outcome: Any, *, waits: bool, num_bytes: int) -> dist.Work:
        """What torch gets of a collective that was started; `waits`: the caller needs it at once."""

    def send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        """Leave a message."""

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        """Have the next message of a rank, or of any."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory that all ranks of this host can read."""

    def close(self) -> None:
        """Nothing more is asked for."""


class LocalWays:
    """Through memory."""

    def __init__(
        self, rank: int, arenas: Sequence[Arena], names: Sequence[str], timeout_s: float, *, native: bool
    ) -> None:
        headers, slots = zip(*(arena.meeting(0) for arena in arenas), strict=True)
        bells = [arena.bell for arena in arenas]
        core = make_core(headers, bells, rank, native=native)
        self._arena = arenas[rank]
        self._buffers: dict[int, Region] = {}
        self.meeting = Meeting(core, slots, rank, names, [arena.pid for arena in arenas], timeout_s)
        self.collectives = Collectives(self.meeting, arenas, self._buffers)
        self._messages = Messages(arenas, rank, names, Bells(bells, rank, native=native), timeout_s)
        self._progress = Progress(self.meeting, "plait_shm")
        self.send, self.receive = self._messages.send, self._messages.receive

    def work(self, started: Any, outcome: Any, *, waits: bool, num_bytes: int) -> dist.Work:
        """See `Ways`."""
        work = ShmWork(self.meeting, started, outcome)
        if waits:
            self.meeting.finish(started)
            return work
        if num_bytes <= _INLINE_BYTES:
            self.meeting.progress()
        if not started.is_done:
            self._progress.wake()
        return work

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """See `Ways`: sums of it are made where it lies."""
        region = self._arena.extend(count * dtype.itemsize)
        self._buffers[region.bytes.data_ptr()] = region
        return region.tensor(count, dtype)

    def close(self) -> None:
        """See `Ways`."""
        self._progress.close()
