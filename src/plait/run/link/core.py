"""Executes rows of `steps` on memory that ranks share: compiled where `core.c` was built, else in Python.

In: rows, tensors as registers. Out: the row at which it stopped for another rank; it can go on from there. Ranks that
meet all use the same one, since only the compiled one wakes who sleeps.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from plait.run.link import native
from plait.run.link.steps import CHECK, COPY, OPERATIONS, POST, REDUCE, REDUCED, ROW, SIGN, WAIT, Rows

HEADER_BYTES = 4096
"""Of a rank in a group: its counter, its sleepers, its last two signatures."""
_COUNTER, _SIGNATURES = 0, 8
"""Where they are in a header, in words; as in core.c."""
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
        registers: Sequence[Tensor],
        signature: "Signature",
        limit_s: float,
    ) -> int:
        """Rows from `row` on, until one waits longer than `limit_s`: its number, DONE, or DISAGREE - the other rank."""

    def counter(self, rank: int) -> int:
        """How far a rank has come."""

    def signature(self, rank: int, number: int) -> list[int]:
        """What a rank says of a collective in which this one is, too."""


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
        ("counters", ctypes.c_void_p * _MOST_RANKS),
        ("headers", ctypes.c_void_p * _MOST_RANKS),
    ]


class NativeCore:
    """In C: it waits without the interpreter's lock, and is woken."""

    def __init__(self, library: ctypes.CDLL, headers: Sequence[Tensor], own: int) -> None:
        places = [header.data_ptr() for header in headers]
        room = (ctypes.c_void_p * _MOST_RANKS)(*places)
        spins = _SPINS if len(headers) <= _processors() else 0
        self._group = _Group(len(headers), own, spins, room, room)
        self._words = [header.view(torch.int32).numpy() for header in headers]
        self._signatures = [header.view(torch.int64).numpy() for header in headers]
        self._advance: Callable[..., int] = library.plait_advance
        self._advance.restype = ctypes.c_int64
        self._reference = ctypes.byref(self._group)

    def advance(
        self,
        rows: Rows,
        row: int,
        base: int,
        registers: Sequence[Tensor],
        signature: Signature,
        limit_s: float,
    ) -> int:
        """See `Core`."""
        places = (ctypes.c_void_p * len(registers))(*[tensor.data_ptr() for tensor in registers])
        return self._advance(
            self._reference,
            ctypes.c_void_p(rows.words.buffer_info()[0]),
            ctypes.c_int64(rows.count),
            ctypes.c_int64(row),
            ctypes.c_uint32(base % _WRAP),
            places,
            signature,
            ctypes.c_int64(int(limit_s * 1e6)),
        )

    def counter(self, rank: int) -> int:
        """See `Core`."""
        return int(self._words[rank][_COUNTER]) % _WRAP

    def signature(self, rank: int, number: int) -> list[int]:
        """See `Core`."""
        start = _SIGNATURES + SIGNATURE_WORDS * (number % 2)
        return [int(word) for word in self._signatures[rank][start : start + SIGNATURE_WORDS]]


class PythonCore:
    """In Python, with torch's sums: for hosts where nothing was compiled."""

    def __init__(self, headers: Sequence[Tensor], own: int) -> None:
        self._own = own
        self._counters = [memoryview(header.numpy()).cast("I") for header in headers]  # type: ignore[arg-type]
        self._words = [memoryview(header.numpy()).cast("Q") for header in headers]  # type: ignore[arg-type]

    def advance(
        self,
        rows: Rows,
        row: int,
        base: int,
        registers: Sequence[Tensor],
        signature: Signature,
        limit_s: float,
    ) -> int:
        """See `Core`."""
        flats = [tensor.reshape(-1).view(torch.uint8) for tensor in registers]
        ranks, place = len(self._words), _SIGNATURES + SIGNATURE_WORDS * (signature[0] % 2)
        for at in range(row, rows.count):
            kind, *rest = rows.words[ROW * at : ROW * at + ROW]
            if kind == COPY:
                to, to_at, source, source_at, count, *_ = rest
                flats[to][to_at : to_at + count].copy_(flats[source][source_at : source_at + count])
            elif kind == REDUCE:
                to, to_at, first, source_at, count, dtype, how = rest
                parts = [
                    flat[source_at : source_at + count].view(REDUCED[dtype])
                    for flat in flats[first : first + ranks]
                ]
                flats[to][to_at : to_at + count].view(REDUCED[dtype]).copy_(_combined(parts, OPERATIONS[how]))
            elif kind == POST:
                self._counters[self._own][_COUNTER] = (base + rest[0]) % _WRAP
            elif kind == WAIT:
                if not self._wait(base + rest[0], limit_s):
                    return at
            elif kind == SIGN:
                for index, word in enumerate(signature):
                    self._words[self._own][place + index] = word
            elif kind == CHECK:
                own = list(signature[:COMPARED_WORDS])
                for rank, words in enumerate(self._words):
                    if list(words[place : place + COMPARED_WORDS]) != own:
                        return DISAGREE - rank
        return DONE

    def _wait(self, wanted: int, limit_s: float) -> bool:
        end_s, looks = 0.0, 0
        for counters in self._counters:
            while (counters[_COUNTER] - wanted) % _WRAP > _WRAP // 2:
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

    def counter(self, rank: int) -> int:
        """See `Core`."""
        return int(self._counters[rank][_COUNTER])

    def signature(self, rank: int, number: int) -> list[int]:
        """See `Core`."""
        start = _SIGNATURES + SIGNATURE_WORDS * (number % 2)
        return list(self._words[rank][start : start + SIGNATURE_WORDS])


def _combined(parts: Sequence[Tensor], operation: str) -> Tensor:
    """All parts as one, the first rank's first."""
    combine = {"product": torch.mul, "max": torch.maximum, "min": torch.minimum}.get(operation, torch.add)
    found = combine(parts[0], parts[1]) if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        combine(found, part, out=found)
    return found.div_(len(parts)) if operation == "mean" else found


@cache
def compiled() -> ctypes.CDLL | None:
    """The compiled core, where there is one."""
    return native.load(native.library())


def make_core(headers: Sequence[Tensor], own: int, *, native: bool) -> Core:
    """The executor of rank `own`; `headers` of all ranks of the group, each `HEADER_BYTES`."""
    library = compiled() if native else None
    return PythonCore(headers, own) if library is None else NativeCore(library, headers, own)


def _processors() -> int:
    return len(os.sched_getaffinity(0))
