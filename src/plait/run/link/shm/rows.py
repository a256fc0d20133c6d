"""What ranks do of a collective through shared memory, as rows of numbers that `core` executes, written one by one.

In: copies, sums and meetings. Out: `Rows`.
"""

from array import array
from dataclasses import dataclass

import torch

from plait.errors import PlanError

COPY, REDUCE, POST, WAIT, COME, CHECK = range(6)
ROW = 8
"""Numbers a row: what it is, then its arguments."""
SLOT_BYTES = 1 << 19
"""Of each of a rank's two slots. Several of them fit into the cache that processors share."""
LINE = 64
"""Pieces start at a cache line."""
REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip
"""What can be summed, by its number in rows."""
OPERATIONS = ("sum", "mean", "product", "max", "min")
"""How, by its number in rows."""
_FLOATS = 4
"""So many of the first `REDUCED` are floats."""
_AS_OTHERS = {
    torch.complex64: torch.float32, torch.complex128: torch.float64, torch.uint16: torch.int16,
    torch.uint32: torch.int32, torch.uint64: torch.int64,
}  # fmt: skip
"""What is summed as something else: complex numbers part by part, unsigned ones modulo the same power."""
_AS_BOOLS = {"sum": "max", "product": "min", "max": "max", "min": "min"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A collective of one rank, for any tensors of these sizes."""

    words: "array[int]"
    """`ROW` numbers a row."""
    count: int
    posts: int
    """How far the rank's counter moves."""
    uses: int
    """Slots that it uses, one after another."""
    is_settled: bool = True
    """Whether the result is there with the last row. Else that row waits for the others' parts: whoever does not need
    them yet may go on with its next collective."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How elements of a dtype are combined, as numbers in rows."""

    dtype: int
    operation: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return REDUCED[self.dtype].itemsize


def reduction(dtype: torch.dtype, operation: str) -> Reduction:
    """What a dtype and an operation are in rows; an error where nobody can do it."""
    if dtype is torch.bool and operation in _AS_BOOLS:
        return Reduction(REDUCED.index(torch.uint8), OPERATIONS.index(_AS_BOOLS[operation]))
    as_other = _AS_OTHERS.get(dtype, dtype)
    allowed = (
        ("sum", "mean") if dtype.is_complex else ("sum", "product") if as_other is not dtype else OPERATIONS
    )
    index = REDUCED.index(as_other) if as_other in REDUCED else -1
    if index < 0 or operation not in allowed or (operation == "mean" and index >= _FLOATS):
        raise PlanError(
            f"ranks cannot combine tensors of {dtype} by {operation}.",
            fix="use a sum, product, min or max of floats or integers; a mean of floats.",
        )
    return Reduction(index, OPERATIONS.index(operation))


class Writer:
    """Rows one after another, of rank `own` of `ranks`. Registers: slots, then what comes in, then what comes out."""

    def __init__(self, ranks: int, own: int) -> None:
        self.ranks, self.own = ranks, own
        self.uses = 0
        self._words = array("q")
        self._posts = 0

    def rows(self, *, is_settled: bool = True) -> Rows:
        """What was written."""
        count = len(self._words) // ROW
        return Rows(words=self._words, count=count, posts=self._posts, uses=self.uses, is_settled=is_settled)

    def slot(self, rank: int) -> int:
        """The register of a rank's slot of the piece that is under way."""
        return (self.uses % 2) * self.ranks + rank

    def given(self, index: int = 0) -> int:
        """The register of a tensor that is read."""
        return 2 * self.ranks + index

    def taken(self, index: int = 0) -> int:
        """The register of a tensor that is written."""
        return 3 * self.ranks + index

    def copy(self, to: int, to_at: int, source: int, at: int, num_bytes: int) -> None:
        """Bytes from one place to another."""
        if num_bytes > 0:
            self._row(COPY, to, to_at, source, at, num_bytes)

    def reduce(self, to: int, to_at: int, first: int, at: int, num_bytes: int, how: Reduction) -> None:
        """The same bytes of registers `first` and on, one a rank, combined."""
        if num_bytes > 0:
            self._row(REDUCE, to, to_at, first, at, num_bytes, how.dtype, how.operation)

    def meet(self) -> None:
        """Tell the others that this rank has come so far, and wait until all have; first, that all do the same."""
        self._posts += 1
        self._row(POST, self._posts)
        self._row(WAIT, self._posts)
        if self._posts == 1:
            self._row(CHECK)

    def come(self) -> None:
        """Wait until all have announced the same collective."""
        self._row(COME)
        self._row(CHECK)

    def leave(self) -> None:
        """Tell the others, and wait for nobody."""
        self._posts += 1
        self._row(POST, self._posts)

    def settle(self) -> None:
        """Wait for the others' parts of what was done last."""
        self._row(WAIT, self._posts)

    def _row(self, *numbers: int) -> None:
        self._words.extend((*numbers, *(0,) * (ROW - len(numbers))))
