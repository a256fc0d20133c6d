"""What ranks of a mesh say to each other: collectives, messages, and what is sent of a bucket."""

from dataclasses import dataclass
from typing import Literal

from plait.program.instructions.base import Instruction, Lane, TimeKind
from plait.program.value import Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective(Instruction):
    """Start communication along an axis; its result may be used after the `Wait` that names it."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    op: Literal["all_reduce", "all_gather", "reduce_scatter", "halo", "halo_add", "broadcast", "reduce"]
    """Of a broadcast the first rank alone reads, of a reduce it alone writes."""
    axis: str
    """A mesh axis, or several joined by `+`: the ranks that meet differ in these coordinates alone."""
    dim: int = 0
    """Dim on which shards are joined or cut."""
    extents: tuple[int, ...] = ()
    """Extents of the shards of an all_gather or reduce_scatter, one per rank."""
    before: int = 0
    """Rows of the rank before that a halo holds."""
    after: int = 0
    """Rows of the next rank that a halo holds."""
    fill: float = 0.0
    """What a halo holds beyond the two ends."""

    @property
    def source(self) -> Value | None:
        """What a rank brings; None: it receives only."""
        return self.reads[0] if self.reads else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Send(Instruction):
    """Send values to another rank in one message; the sender does not wait."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    axis: str
    """The mesh axis along which it travels."""
    to: int
    """Coordinate of the receiver on that axis."""
    message: str
    """What the message is, the same on both sides: `forward 0>1 micro-batch 3`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recv(Instruction):
    """Make room for a message; its values may be used after the `Wait` that names it."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    axis: str
    source: int
    """Coordinate of the sender."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait(Instruction):
    """Block the compute lane until a collective is done or a message is there."""

    kind: TimeKind = "wait"
    of: int
    """Id of the `Collective` or `Recv`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compress(Instruction):
    """Make what is sent of a bucket; what stays behind is added to the next step's gradients."""

    kind: TimeKind = "backward"
    bucket: int
    part: int = 0
    """Of powersgd: 0 the left factors, 1 the right ones, which need the sum of the left ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decompress(Instruction):
    """Turn what all ranks have sent of a bucket back into gradients."""

    kind: TimeKind = "update"
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Combine(Instruction):
    """Add a block that was received to the own one: a hop of a collective that is written as messages."""

    kind: TimeKind = "communication"
