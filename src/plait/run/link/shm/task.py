"""One collective among ranks that share memory, as each of them tells it to the others.

In: what is to be done with which tensors. Out: a `Task`, which a `Meeting` carries out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.run.link.shm.core import Signature
from plait.run.link.shm.rows import OPERATIONS, REDUCED, Rows

KINDS = (
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all",
    "halo", "halo_add",
)  # fmt: skip
"""What ranks may meet for, by its number in signatures."""
DTYPES = (
    *REDUCED, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Dtypes that ranks tell each other, by their number in signatures."""
SAME_FIX = "let all ranks of a group call the same collectives in the same order, with tensors of one kind."


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
    """Of the collective among those of the group; what comes of a task has its number."""
    signature: Signature | None = None
    registers: list[Tensor] = field(default_factory=list)
    is_done: bool = False
    """Whether it and all that came of it are done."""
    origin: "Task | None" = None
    """The task of which this one came."""
    told: "Callable[[BaseException | None], None] | None" = None
    """Who is told when it is done or has failed."""

    @property
    def first(self) -> "Task":
        """The task that was started."""
        return self.origin or self

    def describe(self) -> str:
        """For people."""
        return told(self.kind, self.dtype, self.operation, self.root, self.num_bytes)


def told(kind: str, dtype: torch.dtype | None, operation: int, root: int, num_bytes: int) -> str:
    """A collective, for people."""
    known = [OPERATIONS[operation]] if operation >= 0 else []
    known += [str(dtype)] if dtype is not None else []
    how = f" ({', '.join(known)})" if known else ""
    toward = f" with root {root}" if root >= 0 else ""
    return f"{kind}{how} of {num_bytes:,} bytes{toward}"
