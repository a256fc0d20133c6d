"""A slow network between hosts that are none: when bytes that ranks of one machine send each other may arrive.

In: an `Emulation`. Out: moments. Each host has a wire, out and in, of the given bandwidth, which its ranks share
through a page of memory that all processes see; a message arrives when its bytes have passed both and the latency is
over. Bytes are held back at the sender, so what travels afterwards takes (almost) no time. It needs no root.
"""

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from plait.options import Emulation
from plait.run.wire.tell import tell

_CHUNK_BYTES = 1 << 17
"""That have a wire to themselves: ranks that send at once take turns."""
_AHEAD = 4
"""Chunks for which a rank has its turns before the first has passed, so that a late look costs no bandwidth."""


class Wire:
    """The wires of all hosts, as one rank sees them."""

    def __init__(self, emulation: Emulation, rank: int, file: int) -> None:
        self._emulation, self._host = emulation, emulation.host_of(rank)
        self.bandwidth = emulation.bandwidth
        """Bytes a second, of each wire."""
        self._file = file
        self._free_s = memoryview(mmap.mmap(file, 16 * emulation.hosts)).cast("d")
        """Of each host: when its wire out, and in, is free again."""

    @classmethod
    def between(cls, emulation: Emulation, rank: int) -> "Wire":
        """The same wires on all ranks, which must all call it; they meet through torch.distributed."""
        file, pid = -1, os.getpid()
        if rank == 0:
            file = os.memfd_create("plait-wires")
            os.posix_fallocate(file, 0, 16 * emulation.hosts)
        file_of_first, pid_of_first = tell([file, pid])[0]
        if rank:
            file = os.open(f"/proc/{pid_of_first}/fd/{file_of_first}", os.O_RDWR)
        tell(True)  # the first one's file is open until all have it
        return cls(emulation, rank, file)

    def is_crossed(self, to: int) -> bool:
        """Whether a rank is on another host."""
        return self._emulation.host_of(to) != self._host

    def turn(self, to: int, num_bytes: int) -> tuple[float, float]:
        """Take the wires to a rank for some bytes: when they have left, and when they are there."""
        out, into = 2 * self._host, 2 * self._emulation.host_of(to) + 1
        with self._alone():
            free = self._free_s
            start_s = max(time.monotonic(), free[out], free[into])
            left_s = free[out] = free[into] = start_s + num_bytes / self._emulation.bandwidth
        return left_s, left_s + self._emulation.latency_s

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class Passage:
    """What may go to one rank now, and what later."""

    def __init__(self, wire: Wire, to: int) -> None:
        self._wire, self._to = wire, to
        self._turns: deque[tuple[float, float, int]] = deque()
        """When bytes have left, when they are there, how many."""
        self.open_bytes = 0
        """That have passed the wire: whoever sends them takes them off."""
        self.next_s: float | None = None
        """When to look again; None: there is nothing to wait for."""

    def look(self, waiting_bytes: int) -> None:
        """See what has passed; take turns for what waits."""
        now_s = time.monotonic()
        while self._turns and self._turns[0][1] <= now_s:
            self.open_bytes += self._turns.popleft()[2]
        left = waiting_bytes - self.open_bytes - sum(count for _, _, count in self._turns)
        while left > 0 and sum(left_s > now_s for left_s, _, _ in self._turns) < _AHEAD:
            count = min(left, _CHUNK_BYTES)
            self._turns.append((*self._wire.turn(self._to, count), count))
            left -= count
        self.next_s = self._turns[0][1] if self._turns else None
        if left > 0:  # as soon as the wire has let one of the turns go
            self.next_s = min(turn[0] if turn[0] > now_s else turn[1] for turn in self._turns)
