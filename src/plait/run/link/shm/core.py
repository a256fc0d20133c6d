"""Executes rows of `steps` on memory that ranks share: compiled where `core.c` was built, else in Python.

In: rows, tensors as registers. Out: the row at which it stopped for another rank; it can go on from there. Ranks that
meet all use the same one, since only the compiled one wakes who sleeps.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.run import native
from plait.run.link.shm.rows import CHECK, COME, COPY, OPERATIONS, POST, REDUCE, REDUCED, ROW, WAIT, Rows

HEADER_BYTES = 3 * 4096
"""Of a rank in a group: its counters, whether it gave up, its last signatures."""
_COUNTER, _ANNOUNCED, _GIVEN_UP, _SIGNATURES = 0, 1, 2, 8
"""Where they are in a header, in words of 32 bits, the last of 64; as in core.c."""
RING = 64
"""Collectives that a rank may have announced and not all others have done; as in core.c."""
SIGNATURE_WORDS, COMPARED_WORDS = 16, 6
"""What a rank says of a collective, and how much of it must be the same on all."""
DONE, DISAGREE = -1, -2
"""What `advance` says instead of a row; as in core.c."""
_MOST_RANKS = 256
"""Of a group on one host; as in core.c."""
_SPINS = 60
"""Rounds of about a microsecond that a rank looks before it sleeps, where every rank can have a processor."""
_YIELDS = 200
"""Looks of the core in Python before it starts to sleep between looks."""
_LONGEST_SLEEP_S = 0.0005
"""Between two of those looks: the least that gloo takes for a kilobyte between two processes of a host."""
_WRAP = 1 << 32
"""Counters have 32 bits, which is what a futex waits on."""


class Core(Protocol):
    """The executor of one group on one rank."""

    def advance(
        self,
        rows: Rows,
        row: int,
        base: int,
        count: int,
        registers: Sequence[Tensor],
        signature: "Signature",
        limit_s: float,
    ) -> int:
        """Rows from `row` to `count`, until one waits longer than `limit_s`: its number, DONE, or DISAGREE - rank."""

    def announce(self, signature: "Signature", *, rings: bool) -> None:
        """Say what this rank's next collective is; `rings`: wake those that wait for just that."""

    def has_come(self, rank: int, count: int, *, announced: bool = False) -> bool:
        """Whether a rank has come so far: in its posts, or in what it has announced."""

    def signature(self, rank: int, number: int) -> list[int]:
        """What a rank has announced of a collective in which this one is, too."""

    def give_up(self, culprit: int) -> None:
        """Let the others know that this rank does not go on, and because of whom."""

    def given_up(self, rank: int) -> int | None:
        """Because of whom a rank does not go on; None where it does."""


Signature = ctypes.Array[ctypes.c_uint64]
"""The number of a collective, what it is and where this rank's tensor lies."""


def make_signature(words: Sequence[int]) -> Signature:
    """A signature of these words."""
    return (ctypes.c_uint64 * SIGNATURE_WORDS)(*words)


class _Group(ctypes.Structure):
    _fields_ = [
        ("ranks", ctypes.c_int64),
        ("own", ctypes.c_int64),
        ("spins", ctypes.c_int64),
        ("headers", ctypes.c_void_p * _MOST_RANKS),
        ("bells", ctypes.c_void_p * _MOST_RANKS),
    ]


class _Headers:
    """What both cores read of the ranks' headers."""

    def __init__(self, headers: Sequence[Tensor], own: int) -> None:
        self._own = own
        self._counters = [memoryview(header.numpy()).cast("I") for header in headers]  # type: ignore[arg-type]
        self._words = [memoryview(header.numpy()).cast("Q") for header in headers]  # type: ignore[arg-type]

    def has_come(self, rank: int, count: int, *, announced: bool = False) -> bool:
        """See `Core`."""
        word = _ANNOUNCED if announced else _COUNTER
        return (self._counters[rank][word] - count) % _WRAP < _WRAP // 2

    def signature(self, rank: int, number: int) -> list[int]:
        """See `Core`."""
        start = _SIGNATURES + SIGNATURE_WORDS * (number % RING)
        return list(self._words[rank][start : start + SIGNATURE_WORDS])

    def give_up(self, culprit: int) -> None:
        """See `Core`."""
        self._counters[self._own][_GIVEN_UP] = culprit + 1

    def given_up(self, rank: int) -> int | None:
        """See `Core`."""
        return self._counters[rank][_GIVEN_UP] - 1 if self._counters[rank][_GIVEN_UP] else None


class NativeCore(_Headers):
    """In C: it waits without the interpreter's lock, and is woken."""

    def __init__(
        self,
        library: ctypes.CDLL,
        headers: Sequence[Tensor],
        bells: Sequence[Tensor],
        own: int,
        *,
        spins: bool = True,
    ) -> None:
        super().__init__(headers, own)
        rooms = [
            (ctypes.c_void_p * _MOST_RANKS)(*[t.data_ptr() for t in found]) for found in (headers, bells)
        ]
        rounds = _SPINS if spins and len(headers) <= _processors() else 0
        self._group = _Group(len(headers), own, rounds, *rooms)
        self._advance: Callable[..., int] = library.plait_advance
        self._advance.restype = ctypes.c_int64
        self._announce: Callable[..., None] = library.plait_announce
        self._announce.restype = None
        self._reference = ctypes.byref(self._group)

    def advance(
        self,
        rows: Rows,
        row: int,
        base: int,
        count: int,
        registers: Sequence[Tensor],
        signature: Signature,
        limit_s: float,
    ) -> int:
        """See `Core`."""
        places = (ctypes.c_void_p * len(registers))(*[tensor.data_ptr() for tensor in registers])
        return self._advance(
            self._reference,
            ctypes.c_void_p(rows.words.buffer_info()[0]),
            ctypes.c_int64(count),
            ctypes.c_int64(row),
            ctypes.c_uint32(base % _WRAP),
            places,
            signature,
            ctypes.c_int64(int(limit_s * 1e6)),
        )

    def announce(self, signature: Signature, *, rings: bool) -> None:
        """See `Core`."""
        self._announce(self._reference, signature, ctypes.c_int64(rings))


class PythonCore(_Headers):
    """In Python, with torch's sums: for hosts where nothing was compiled."""

    def advance(
        self,
        rows: Rows,
        row: int,
        base: int,
        count: int,
        registers: Sequence[Tensor],
        signature: Signature,
        limit_s: float,
    ) -> int:
        """See `Core`."""
        flats = [tensor.reshape(-1).view(torch.uint8) for tensor in registers]
        ranks = len(self._words)
        for at in range(row, count):
            kind, *rest = rows.words[ROW * at : ROW * at + ROW]
            if kind == COPY:
                to, to_at, source, source_at, size, *_ = rest
                flats[to][to_at : to_at + size].copy_(flats[source][source_at : source_at + size])
            elif kind == REDUCE:
                to, to_at, first, source_at, size, dtype, how = rest
                parts = [
                    flat[source_at : source_at + size].view(REDUCED[dtype])
                    for flat in flats[first : first + ranks]
                ]
                out = flats[to][to_at : to_at + size].view(REDUCED[dtype])
                _combine(parts, OPERATIONS[how], out)
            elif kind == POST:
                self._counters[self._own][_COUNTER] = (base + rest[0]) % _WRAP
            elif kind == WAIT:
                if not self._wait(base + rest[0], limit_s):
                    return at
            elif kind == COME:
                if not self._wait(signature[0] + 1, limit_s, announced=True):
                    return at
            elif kind == CHECK:
                own = list(signature[:COMPARED_WORDS])
                for rank in range(ranks):
                    if self.signature(rank, signature[0])[:COMPARED_WORDS] != own:
                        return DISAGREE - rank
        return DONE

    def announce(self, signature: Signature, *, rings: bool) -> None:
        """See `Core`."""
        start = _SIGNATURES + SIGNATURE_WORDS * (signature[0] % RING)
        for index, word in enumerate(signature):
            self._words[self._own][start + index] = word
        self._counters[self._own][_ANNOUNCED] = (signature[0] + 1) % _WRAP

    def _wait(self, wanted: int, limit_s: float, *, announced: bool = False) -> bool:
        end_s, looks = 0.0, 0
        for rank in range(len(self._counters)):
            while not self.has_come(rank, wanted, announced=announced):
                if limit_s <= 0:
                    return False
                looks += 1
                if looks < _YIELDS:
                    os.sched_yield()
                    continue
                now_s = time.monotonic()
                end_s = end_s or now_s + limit_s
                if now_s > end_s:
                    return False
                time.sleep(min(_LONGEST_SLEEP_S, 1e-6 * (looks - _YIELDS + 10)))
        return True


def _combine(parts: Sequence[Tensor], operation: str, out: Tensor) -> None:
    """All parts as one, the first rank's first; `out` may be one of them."""
    combine = {"product": torch.mul, "max": torch.maximum, "min": torch.minimum}.get(operation, torch.add)
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    is_later = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = combine(parts[0], parts[1]) if is_later else combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(total, part, out=total)
    if operation == "mean":
        total.div_(len(parts))
    if is_later:
        out.copy_(total)


def compiled() -> ctypes.CDLL | None:
    """The compiled core, where there is one."""
    return native.compiled()


def make_core(
    headers: Sequence[Tensor], bells: Sequence[Tensor], own: int, *, native: bool, spins: bool = True
) -> Core:
    """The executor of rank `own`; `headers` of all ranks of the group, each `HEADER_BYTES`, and their bells.

    `spins`: it may look again and again for a moment before it sleeps, where every rank can have a processor.
    """
    library = compiled() if native else None
    return (
        PythonCore(headers, own) if library is None else NativeCore(library, headers, bells, own, spins=spins)
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0))
