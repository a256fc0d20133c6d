"""What instructions call the tensors that they read, write and free.

A value is a kind and what tells it from others of that kind; it never holds a tensor. Interpreters look tensors up by
value millions of times in a run, so it is a tuple of plain things, which is hashed without a call into Python.
"""

from typing import Literal, NamedTuple

ValueKind = Literal[
    "parameter", "buffer", "stash", "chunk", "batch", "key", "offset", "node", "gradient", "scalar", "bucket", "shard",
    "part", "packed", "gathered", "average", "sum", "center", "block", "state", "stored",
]  # fmt: skip


class Value(NamedTuple):
    """A tensor that instructions name; made by one of the functions below, each of which says how it is printed."""

    kind: ValueKind
    name: str = ""
    """Of a parameter, a buffer, a node of the local graph, a mesh axis or a scalar."""
    number: int = 0
    """Position: of a bucket, of a group of parameters, of a flat, of a leaf of the batch."""
    micro_batch: int | None = None
    """None: of the step, or of the run."""
    part: int = 0
    """Of a stash, its version; of a packed bucket, the message; of tied gradients, the coordinate on `pipe`."""

    def __str__(self) -> str:
        before = "" if self.micro_batch is None else f"{self.micro_batch}/"
        match self.kind:
            case "scalar":
                return self.name if self.micro_batch is None else f"{self.name}:{self.micro_batch}"
            case "node":
                return before + self.name
            case "batch":
                return f"{before}batch.{self.number}"
            case "key":
                return f"{before}key"
            case "parameter" | "buffer" | "offset" | "gradient":
                return f"{before}{self.kind}:{self.name}"
            case "stored":
                return f"stored:{before}{self.name}"
            case "stash":
                return f"stash:{self.name}@{self.part}"
            case "packed" | "part":
                return f"{self.kind}:{self.number}:{self.part}"
            case _:
                return f"{self.kind}:{self.number}"

    @classmethod
    def parameter(cls, name: str) -> "Value":
        """`parameter:fc.weight`"""
        return cls("parameter", name)

    @classmethod
    def stash(cls, name: str, version: int) -> "Value":
        """`stash:fc.weight@2`: a parameter as it is after 2 updates of the step."""
        return cls("stash", name, part=version)

    @classmethod
    def buffer(cls, name: str) -> "Value":
        """`buffer:bn.running_mean`"""
        return cls("buffer", name)

    @classmethod
    def chunk(cls, group: int) -> "Value":
        """`chunk:2`: what this rank holds of a group of parameters; gathered, it becomes these."""
        return cls("chunk", "", group)

    @classmethod
    def batch(cls, leaf: int, micro_batch: int) -> "Value":
        """`0/batch.1`: a tensor of a micro-batch."""
        return cls("batch", "", leaf, micro_batch)

    @classmethod
    def key(cls, micro_batch: int) -> "Value":
        """`0/key`: what random numbers depend on."""
        return cls("key", "", 0, micro_batch)

    @classmethod
    def offset(cls, axis: str, micro_batch: int) -> "Value":
        """`0/offset:data`: where this rank is on an axis; a plain number."""
        return cls("offset", axis, 0, micro_batch)

    @classmethod
    def node(cls, name: str, micro_batch: int) -> "Value":
        """`0/addmm_3`: what a node of the local graph computes."""
        return cls("node", name, 0, micro_batch)

    @classmethod
    def gradient(cls, name: str, micro_batch: int) -> "Value":
        """`0/gradient:fc.weight`: what a model that was not captured adds to a gradient, or to a buffer."""
        return cls("gradient", name, 0, micro_batch)

    @classmethod
    def scalar(cls, name: str, micro_batch: int | None = None) -> "Value":
        """`weight`, of the step; `weight:3`, of a micro-batch that is an update of its own."""
        return cls("scalar", name, 0, micro_batch)

    @classmethod
    def bucket(cls, index: int) -> "Value":
        """`bucket:2`: gradients that travel together."""
        return cls("bucket", "", index)

    @classmethod
    def shard(cls, bucket: int) -> "Value":
        """`shard:2`: what this rank gets of a summed bucket."""
        return cls("shard", "", bucket)

    @classmethod
    def tied_part(cls, bucket: int, coordinate: int) -> "Value":
        """`part:2:1`: what another stage has of a bucket."""
        return cls("part", "", bucket, None, coordinate)

    @classmethod
    def block(cls, number: int) -> "Value":
        """`block:3`: a block of a tensor that travels hop by hop."""
        return cls("block", "", number)

    @classmethod
    def state(cls, bucket: int) -> "Value":
        """`state:2`: what the optimizer keeps for the parameters of a bucket, on the device."""
        return cls("state", "", bucket)

    @classmethod
    def stored(cls, of: "Value") -> "Value":
        """`stored:state:2`: the same value in the host's memory."""
        return cls("stored", str(cls(of.kind, of.name, of.number, None, of.part)), 0, of.micro_batch)

    @classmethod
    def packed(cls, bucket: int, message: int) -> "Value":
        """`packed:2:0`: what is sent of a compressed bucket, message by message."""
        return cls("packed", "", bucket, None, message)

    @classmethod
    def gathered(cls, bucket: int) -> "Value":
        """`gathered:2`: what all ranks have sent of a compressed bucket."""
        return cls("gathered", "", bucket)

    @classmethod
    def average(cls, flat: int) -> "Value":
        """`average:2`: weights of this worker that are averaged."""
        return cls("average", "", flat)

    @classmethod
    def sum(cls, flat: int) -> "Value":
        """`sum:2`: those of all workers together."""
        return cls("sum", "", flat)

    @classmethod
    def center(cls, flat: int) -> "Value":
        """`center:2`: those of the center."""
        return cls("center", "", flat)


TOTAL, WEIGHT, TANGENT = Value.scalar("total"), Value.scalar("weight"), Value.scalar("tangent")
"""Of the step: the loss is total / weight, and gradients have the factor tangent."""
SQUARES, NOTHING = Value.scalar("squares"), Value.scalar("nothing")
"""For the norm of all gradients; what a rank adds to a loss that it does not compute."""
