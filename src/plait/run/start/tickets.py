"""Tickets: a counter in the header of the board, from which workers that wait for nobody take what is next.

In: the board's memory and file. Out: numbers, each given once. Never blocks for a process that has died.
"""

import fcntl
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_TICKETS = struct.Struct("<qq")
_TICKETS_AT = 16
"""Byte of the header: how many tickets have been taken, and the first that is not used, plus one (0: not known)."""


class Tickets:
    """A counter of all ranks. Use it from one thread of a process: the lock is between processes.

    The kernel unlocks for a process that dies, at whatever line; the number that it took is then lost, and nobody
    else's. Through the parent, which has other work, a number costs ten times as much.
    """

    __slots__ = ("_file", "_memory")

    def __init__(self, memory: mmap.mmap, file: int) -> None:
        self._memory = memory
        self._file = file

    def take(self) -> int:
        """0, 1, 2, ... over all who call it, each once."""
        with self._locked():
            taken, end = _TICKETS.unpack_from(self._memory, _TICKETS_AT)
            _TICKETS.pack_into(self._memory, _TICKETS_AT, taken + 1, end)
        return int(taken)

    def end(self, multiple: int) -> int:
        """The first number that nobody uses: whoever asks first sets it, to a `multiple`, above all that were taken."""
        with self._locked():
            taken, end = _TICKETS.unpack_from(self._memory, _TICKETS_AT)
            if not end:
                end = -(-taken // multiple) * multiple + 1
                _TICKETS.pack_into(self._memory, _TICKETS_AT, taken, end)
        return int(end) - 1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, _TICKETS.size, _TICKETS_AT)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, _TICKETS.size, _TICKETS_AT)
