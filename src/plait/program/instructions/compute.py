"""What a rank does by itself: samples, segments, gradients, the update."""

from dataclasses import dataclass, field
from typing import Literal

from plait.job.updates.clip import Clip
from plait.program.instructions.base import Instruction, Lane, TimeKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(Instruction):
    """Take this rank's share of a micro-batch from the loader."""

    kind: TimeKind = "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute(Instruction):
    """Run a segment of the local graph."""

    segment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnAt:
    """Random numbers that the user's code draws at one place, on shares of any size."""

    place: str
    """The module and the line, numbers in its name left out: layers of a list are alike."""
    shape: tuple[int, ...]
    dim: int
    """Which dim of it holds rows of samples; -1: none."""
    by_value: bool = False
    """Whether values decide how many rows there are: they are drawn in the order of samples over all ranks."""
    calls: int = 0
    """How often it is drawn for each sample, where samples are looked at one after the other; 0: not by sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opaque(Instruction):
    """Run the user's model and its backward eagerly: the fallback for models that cannot be captured."""

    kind: TimeKind = "backward"
    parameters: tuple[str, ...]
    """Parameters whose gradients it writes after total and weight."""
    buffers: tuple[str, ...]
    """Buffers of which it writes what this rank adds to them, after the gradients."""
    draws: tuple["DrawnAt", ...] = ()
    """What a trial found of its draws of random numbers."""
    by_samples: bool = False
    """Whether its loss counts by samples, whatever that of a share seems to be a mean of."""
    fixed: float | None = None
    """What its loss divides a sum by in shares of any size; 0: by what a share counts; None: not known."""
    watched: bool = True
    """Whether its random numbers and batch norm are those of the whole batch: the code runs while ops are watched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally(Instruction):
    """Add scalars up: the weight of the step from those of its micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tangent(Instruction):
    """Make the factor of every gradient: 1 / weight, from a value or a constant."""

    weight: float | None
    """The weight where it is known from the shapes; None: read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulate(Instruction):
    """Put gradients (and scalars) into a bucket: copied where fresh, else added."""

    kind: TimeKind = "backward"
    bucket: int
    fresh: bool
    begins: bool
    """Whether it is the first of a step: scalars that no bucket carries are copied then, else added, also where the
    bucket is given back after every micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep(Instruction):
    """Keep this rank's shard of a summed bucket: taken over where fresh, else added."""

    kind: TimeKind = "backward"
    bucket: int
    fresh: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(Instruction):
    """Add up the parts of tied gradients that several stages have, in the order of stages."""

    kind: TimeKind = "update"
    bucket: int
    own: int
    """This rank's coordinate on `pipe`."""
    parts: tuple[int, ...]
    """The coordinates of the others, in the order of `reads` after the own part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SquareSum(Instruction):
    """Add up the squares of this rank's gradients, each part of a gradient on one rank alone: for norms."""

    kind: TimeKind = "update"
    axes: tuple[str, ...]
    """The axes over which the sum is going to be summed."""
    clip: Clip
    """Says whose squares are added up together."""
    parts: tuple[int, ...] = ()
    """The buckets whose squares it keeps for the sum of all, before they leave for the host; none: it makes the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish(Instruction):
    """Turn reduced buckets into gradients ready for the update: divide by a late weight, clip."""

    kind: TimeKind = "update"
    late_weight: bool
    """Whether the gradients still have to be divided by the weight."""
    clip: Clip
    """Largest norms, over every axis, and largest values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stash(Instruction):
    """Copy values, so that an update of the parameters that they are or show does not change them."""

    version: int | None
    """Of parameters: how many updates are in them; None: of views of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy(Instruction):
    """Move values between the device and the host's memory, beside the computation.

    What comes `in` may be used after the `Wait` that names it. What goes `out` is gone from the device; who fetches it
    again gets it whole. What is dropped was not changed since it came in: the host still has it.
    """

    kind: TimeKind = "host"
    lane: Lane = "host"
    way: Literal["in", "out", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(Instruction):
    """One optimizer step on the parameters that this rank holds.

    On the lane `host` it is made of what lies on the host, by the host, beside the computation: its result may be
    used after the `Wait` that names it.
    """

    kind: TimeKind = "update"
    parts: tuple[int, ...] = ()
    """The buckets whose parameters it updates; none: all."""
    state_bytes: int = 0
    """Of the optimizer's state that lies on the host, of an update there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit(Instruction):
    """Make the new values of buffers, and of parameters that the forward writes into, the current ones."""

    kind: TimeKind = "update"
    buffers: tuple[str, ...] = field(default=())
    """Their names, in the order of `reads`."""
