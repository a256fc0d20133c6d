"""The value that says who does what, when: the instructions of every rank for one training step."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from plait.plan.plan import DATA, Plan
from plait.program.instructions import (
    Collective,
    Exchange,
    Instruction,
    Leave,
    Pull,
    Push,
    PushBuffers,
    Recv,
    Send,
    Serve,
)
from plait.program.layout import Group, Layout
from plait.program.place.propagate import Gathered
from plait.program.sized import Sized
from plait.program.value import Value

_EXCHANGES = (Collective, Send, Recv, Push, PushBuffers, Pull, Exchange, Serve, Leave)
SpecKind = Literal["parameter", "gradient", "optimizer", "activation", "buffer", "input", "scalar"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What the tensor is like that a value stands for."""

    kind: SpecKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] = ()
    """As the graph assumes them; empty: not known."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


class Storage(NamedTuple):
    """Memory that one or more values show."""

    value: Value
    """The first that shows it."""
    num_bytes: int
    item: int | None = None
    """Its position, where the value is several tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of a local graph between two points of communication."""

    name: str
    phase: Literal["forward", "backward"]
    inputs: tuple[str, ...]
    """Local names, without the micro-batch."""
    outputs: tuple[str, ...]
    source: str
    """The Python source that runs it, for people and for digests."""
    run: Callable[..., tuple[Any, ...]]
    """Takes a list of tensors, which it empties, and returns the outputs; a second list, where given, holds for each of
    `fillable` the memory to write it to, or None."""
    num_ops: int
    flops: int
    fillable: tuple[int, ...] = ()
    """Outputs, by position, that can be written to memory of the caller's choice."""
    steps: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Local names in the order in which they are computed, each with the names that are dropped after it."""
    over: Mapping[str, str] = field(default_factory=dict)
    """Names of which the value is written over that of another, which nobody reads any more."""
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False, compare=False)
    """The same as nodes of the local graph, for those who ask what they cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients that travel together."""

    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    axis: str | None
    """The axes over which it is summed, joined by `+`; None: nothing to sum."""
    tied: tuple[int, ...] = ()
    """The coordinates on `pipe` that have parts of the same gradients, and add them up at the end."""
    scalars: tuple[str, ...] = ()
    """Further scalars at its end: `total`, `weight`."""
    buffers: tuple[str, ...] = ()
    """Buffers that travel in place of gradients; then it has no parameters, and `shapes` are theirs."""
    group: Group | None = None
    """Where its gradients are cut over `data` like their parameters: each rank gets the sum of its own chunk alone."""

    @property
    def tensors(self) -> tuple[Value, ...]:
        """What it holds gradients or new values of, without scalars: one for each of `shapes`."""
        return (*map(Value.parameter, self.parameters), *map(Value.buffer, self.buffers))

    @property
    def num_elements(self) -> int:
        """Elements of the flat tensor, scalars and padding included."""
        if self.group is not None:
            return self.group.num_elements
        return sum(torch.Size(shape).numel() for shape in self.shapes) + len(self.scalars)

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.num_elements * self.dtype.itemsize

    @property
    def other_axes(self) -> str | None:
        """Axes over which a rank's chunk is summed, after `data`."""
        names = [name for name in (self.axis or "").split("+") if name != DATA]
        return "+".join(names) or None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgram:
    """What one rank does, or several that differ in their coordinates alone.

    Ids are positions in the body; those of the prologue come after them, then those of the epilogue.
    """

    instructions: tuple[Instruction, ...]
    """The body: one step, made again and again; of a server, the whole run."""
    buckets: tuple[Bucket, ...]
    """Of the parameters that it holds."""
    segments: Mapping[str, Segment]
    values: Mapping[Value, Spec]
    """What the instructions name, where its size is known."""
    constants: Mapping[Value, torch.Tensor]
    """Tensors that the model holds outside of parameters and buffers."""
    storages: Mapping[Value, tuple[Storage, ...]] = field(default_factory=dict)
    """The memory that each value shows; views share it."""
    shows: Mapping[Value, Value] = field(default_factory=dict)
    """Of nodes that lie in the memory of a parameter: that parameter."""
    averages: tuple[Bucket, ...] = ()
    """Weights, or buffers, that are averaged over workers, flat by flat."""
    prologue: tuple[Instruction, ...] = ()
    """Before the first step."""
    epilogue: tuple[Instruction, ...] = ()
    """After the last step."""
    sized: Sized | None = None
    """How it follows the sizes of a batch; None: it is for one size alone."""
    same_sizes: frozenset[int] = frozenset()
    """Micro-batches that vary and of which ranks of `data` exchange activations: they must have the same extents."""

    @property
    def serve(self) -> Serve | None:
        """The one instruction of a server; None: this is a worker."""
        first = self.instructions[0] if self.instructions else None
        return first if isinstance(first, Serve) else None

    @property
    def everything(self) -> tuple[Instruction, ...]:
        """What it does from first to last, with one step."""
        return (*self.prologue, *self.instructions, *self.epilogue)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One step of all ranks."""

    plan: Plan
    micro_batches: tuple[int, ...]
    """Samples of each micro-batch, over all ranks."""
    shares: tuple[tuple[int, ...], ...]
    """Samples of each rank of `data`, by micro-batch."""
    classes: tuple[RankProgram, ...]
    members: tuple[int, ...]
    """The class of each rank: of the workers of the mesh, then of the servers."""
    layout: Layout
    """Where parameters are held; the same for all programs of a run."""
    gathered: tuple[Gathered, ...]
    """Where a tensor had to be made whole for want of a rule."""
    notices: tuple[str, ...]
    total_weight: float | None
    """The weight of the whole step, where it is known from the shapes."""
    conditional: frozenset[str] = frozenset()
    """Parameters whose gradient may be absent, by the values in a step."""
    beside: tuple[tuple[str, ...], ...] = ()
    """Parameters that are read as one tensor: a view where they lie side by side."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Those of all ranks, each once."""
        return tuple(dict.fromkeys(bucket for entry in self.classes for bucket in entry.buckets))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of a step, as they are before anybody compresses or cuts them."""
        return sum(bucket.num_bytes for bucket in self.buckets if bucket.parameters)

    def pairs(self) -> tuple[tuple[str, int, int], ...]:
        """Who sends messages to whom: (axis, sender, receiver), each once, in the same order on every rank."""
        mesh = self.plan.mesh
        return tuple(
            sorted(
                {
                    (instruction.axis, rank, mesh.group(rank, instruction.axis)[instruction.to])
                    for rank in range(mesh.size)
                    for instruction in self.of(rank).instructions
                    if isinstance(instruction, Send)
                }
            )
        )

    def of(self, rank: int) -> RankProgram:
        """What one rank does."""
        return self.classes[self.members[rank]]

    def meets_within(self, *, sums: bool) -> frozenset[int]:
        """Micro-batches within which ranks of `data` exchange what they compute: whole tensors, or also `sums`."""
        return frozenset(
            i.micro_batch
            for entry in self.classes
            for i in entry.instructions
            if isinstance(i, Collective)
            and i.micro_batch is not None
            and DATA in i.axis.split("+")
            and i.source is not None
            and i.source.kind == "node"
            and (sums or i.op != "all_reduce")
        )

    def digest(self) -> str:
        """Equal on all ranks that agree on what they exchange, in which order.

        How much is exchanged within a micro-batch is no part of it: shares may be padded to other lengths.
        """
        text = hashlib.sha256()
        shapes = () if self.plan.agreement.alone else self.micro_batches  # alone, each has its own
        text.update(repr((self.plan, shapes, self.buckets, self.members)).encode())
        for entry in self.classes:
            text.update(repr(entry.averages).encode())
            for instruction in entry.everything:
                if isinstance(instruction, _EXCHANGES):
                    plain = replace(instruction, reads=(), writes=(), frees=())
                    if plain.micro_batch is not None:
                        plain = replace(plain, num_bytes=0)
                    text.update(repr(plain).encode())
        return text.hexdigest()
