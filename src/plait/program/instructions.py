"""What a rank does, one instruction at a time.

Every interpreter (worker, serial, simulator) executes these same values. An instruction names the values that it reads,
writes and frees (`value.py`); it never holds a tensor.
"""

from dataclasses import dataclass, field
from typing import Literal

from plait.job.updates.clip import Clip
from plait.plan.decisions import Compression
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(Instruction):
    """Take this rank's share of a micro-batch from the loader."""

    kind: TimeKind = "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute(Instruction):
    """Run a segment of the local graph."""

    segment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Opaque(Instruction):
    """Run the user's model and its backward eagerly: the fallback for models that cannot be captured."""

    kind: TimeKind = "backward"
    parameters: tuple[str, ...]
    """Parameters whose gradients it writes after total and weight."""
    buffers: tuple[str, ...]
    """Buffers of which it writes what this rank adds to them, after the gradients."""
    draw_dims: tuple[int, ...] | None = None
    """The dim that holds samples, by draw of random numbers (-1: none); None: not known."""
    watched: bool = True
    """Whether its random numbers and batch norm are those of the whole batch: the code runs while ops are watched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective(Instruction):
    """Start communication along an axis; its result may be used after the `Wait` that names it."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    op: Literal["all_reduce", "all_gather", "reduce_scatter", "halo", "halo_add"]
    axis: str
    """A mesh axis, or several joined by `+`: the ranks that meet differ in these coordinates alone."""
    dim: int = 0
    """Dim on which pieces are joined or cut."""
    extents: tuple[int, ...] = ()
    """Extents of the pieces of an all_gather or reduce_scatter, one per rank."""
    before: int = 0
    """Rows of the rank before that a halo holds."""
    after: int = 0
    """Rows of the next rank that a halo holds."""
    fill: float = 0.0
    """What a halo holds beyond the two ends."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Compress(Instruction):
    """Make what is sent of a bucket; what stays behind is added to the next step's gradients."""

    kind: TimeKind = "backward"
    bucket: int
    method: Compression
    part: int = 0
    """Of powersgd: 0 the left factors, 1 the right ones, which need the sum of the left ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decompress(Instruction):
    """Turn what all ranks have sent of a bucket back into gradients."""

    kind: TimeKind = "update"
    bucket: int
    method: Compression


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep(Instruction):
    """Keep this rank's part of a summed bucket: taken over where fresh, else added."""

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
class Combine(Instruction):
    """Add a block that was received to the own one: a hop of a collective that is written as messages."""

    kind: TimeKind = "communication"


@dataclass(frozen=True, kw_only=True, slots=True)
class SquareSum(Instruction):
    """Add up the squares of this rank's gradients, each part of a gradient on one rank alone: for norms."""

    kind: TimeKind = "update"
    axes: tuple[str, ...]
    """The axes over which the sum is going to be summed."""
    clip: Clip
    """Says whose squares are added up together."""


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
class Update(Instruction):
    """One optimizer step on the parameters that this rank holds."""

    kind: TimeKind = "update"


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit(Instruction):
    """Make the new values of buffers the current ones."""

    kind: TimeKind = "update"
    buffers: tuple[str, ...] = field(default=())
    """Buffer names, in the order of `reads`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flatten(Instruction):
    """Copy weights, or buffers, of this worker into one flat tensor."""

    kind: TimeKind = "update"
    flat: int
    """Position in the rank's `averages`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookahead(Instruction):
    """Move weights along their momentum, to where their gradients are taken; the flat tensor keeps where they were."""

    kind: TimeKind = "update"
    flat: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum(Instruction):
    """Take as momentum how far weights are from where they were before `Lookahead`."""

    kind: TimeKind = "update"
    flat: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(Instruction):
    """Send a flat tensor to the rank that has the center, which moves towards it; where it was comes back.

    That may be used after the `Wait` that names it.
    """

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    flat: int
    rule: Literal["elastic", "share"]
    """How far the center moves: by the learning rate times rho, or by this worker's share in the mean of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix(Instruction):
    """Move weights by those of all workers: to their mean, by an outer step towards it, or by an elastic force."""

    kind: TimeKind = "update"
    flat: int
    rule: Literal["mean", "outer", "elastic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Push(Instruction):
    """Send a bucket's gradients to the servers, each its part; the worker does not wait."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PushBuffers(Instruction):
    """Send new values of buffers to the first server, who saves them."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    buffers: tuple[str, ...]
    """Buffer names, in the order of `reads`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull(Instruction):
    """Ask the servers for the parameters of a bucket; they may be used after the `Wait` that names it."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Instruction):
    """Read the total and the weight of what this worker has computed: the gradients are the servers' affair."""

    kind: TimeKind = "update"
    late_weight: bool
    """Whether the weight is known only now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor(Instruction):
    """Before the first step: what workers are drawn to is where they are, and nothing moves yet."""

    kind: TimeKind = "update"
    center: bool
    """Whether every worker keeps the center; else another rank has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(Instruction):
    """After the last step: tell the servers that nothing more comes from this worker."""

    kind: TimeKind = "communication"


Handler = Literal["push", "buffers", "skip", "exchange", "pull", "bye", "squares", "state", "update"]
"""What a server can be busy with: messages, by their kind, and updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve(Instruction):
    """Hold weights for the whole run: take what workers send, apply updates, give weights, as requests come in.

    What comes next is not known beforehand: it is a queue with a handler for every kind of message.
    """

    kind: TimeKind = "update"
    handlers: tuple[Handler, ...]
    """What it may be busy with; the one at position n counts as instruction `id` + 1 + n in a trace."""
    order: Literal["step", "arrival", "turn"]
    """When an update is due: once a step, when all workers have pushed; with each message; or with each one in turn."""
    bound: int = 0
    """With `step`: how many updates weights may lack that are given for a step."""
    gives: tuple[int, ...] = ()
    """Buckets in the order in which a forward needs their weights."""
    buffers: tuple[str, ...] = ()
    """Buffers that come with the gradients."""

    def work(self, handler: Handler) -> int:
        """What a piece of work counts as in a trace."""
        return self.id + 1 + self.handlers.index(handler)


STARTS = (Collective, Recv, Pull, Exchange)
"""Instructions whose result may be used after a `Wait`."""
