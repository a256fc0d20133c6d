"""What all instructions share.

An instruction names the values that it reads, writes and frees (`value.py`); it never holds a tensor.
"""

from dataclasses import dataclass
from typing import Literal

from plait.program.value import Value

Lane = Literal["compute", "communication", "data", "host"]
TimeKind = Literal["data", "forward", "backward", "communication", "wait", "update", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """What all instructions share. Abstract: use one of the classes below."""

    id: int = -1
    """Position in the rank's list, which its writer gives it."""
    name: str
    """What a person reads in a timeline."""
    kind: TimeKind
    """What its time counts as."""
    lane: Lane = "compute"
    """The queue that it runs on."""
    reads: tuple[Value, ...] = ()
    """Values that must exist."""
    writes: tuple[Value, ...] = ()
    """Values that exist afterwards."""
    frees: tuple[Value, ...] = ()
    """Values whose last use this is."""
    micro_batch: int | None = None
    """The micro-batch that it belongs to."""
    stage: int | None = None
    """The pipeline stage that it belongs to."""
    num_bytes: int = 0
    """Bytes that it moves between ranks."""
