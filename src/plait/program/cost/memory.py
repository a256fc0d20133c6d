"""What a step keeps in memory on one rank, read off its program.

In: a program. Out: bytes of what outlives the step, and the most that was alive at once of what does not. Views share
the memory of what they show; an op's inputs live until their last reader is done, as they do when the program runs.
It never runs anything; memory that a kernel uses inside is not seen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait.graph.storage import is_item, shows_input, storage_bytes
from plait.plan.plan import PIPE
from plait.program.cost.places import storages_in_place
from plait.program.instructions import Accumulate, Collective, Compute, Copy, Instruction, Update
from plait.program.program import Program, RankProgram, Storage
from plait.program.value import Value, ValueKind

_UNSEEN = frozenset({"parameter", "buffer", "bucket", "chunk", "shard"})
"""Kinds of values that have their memory all the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes on one rank."""

    parameters: int
    """What the rank holds of parameters all the time."""
    gradients: int
    """What it keeps of gradients until the update."""
    travelling: int
    """Buckets that are on their way at once, beyond what is kept."""
    gathered: int
    """Most of other ranks' parameters that was at hand at once."""
    activations: int
    """Most that was alive at once of what the step computes, its batch included."""
    flat_gradients: int
    """Of `gradients`: those in buckets that are there from step to step, because they travel or are cut."""
    together: int
    """Most at once of activations and of the other gradients, which come to be one after the other."""
    fetched: int = 0
    """Most at once of what lies on the host otherwise, or is on its way."""
    state_away: int = 0
    """Optimizer state that lies on the host."""
    parameters_away: int = 0
    """Parameters that do."""
    gradients_away: int = 0
    """Gradients for which there is room on the host."""
    last_part: int | None = None
    """Where the update comes in parts: parameters of the largest one; None: it comes at once, after the rest."""


def step_memory(program: Program, rank: int = 0) -> StepMemory:
    """What one step of a rank needs."""
    own = program.of(rank)
    if own.serve is not None:
        return _server_memory(program, own)
    layout = program.layout
    pooled = [b.group for b in own.buckets if b.group is not None] if layout.zero >= 2 else []
    kept = sum(
        bucket.group.chunk_elements * bucket.dtype.itemsize if bucket.group in pooled else bucket.num_bytes
        for bucket in own.buckets
    )
    largest = max((b.num_bytes for b in own.buckets if b.group in pooled), default=0)
    loose = {i for i, b in enumerate(own.buckets) if b.axis is None and not b.tied and b.group is None}
    life = _Life(own, frozenset(loose), storages_in_place(own, layout.zero))
    for instruction in own.instructions:
        life.live(instruction)
    away = {
        i.writes: i.num_bytes
        for i in own.instructions
        if isinstance(i, Copy) and i.way == "in" and i.writes[0].kind in ("parameter", "chunk")
    }
    in_place = 0 < layout.zero < 3  # a chunk is gathered to where all of its group stays
    return StepMemory(
        parameters=_parameter_bytes(program, rank) - (0 if in_place else sum(away.values())),
        gradients=kept,
        travelling=min(2, len(pooled)) * largest,
        gathered=life.peak_gathered if layout.zero == 3 else 0,
        activations=life.peak,
        flat_gradients=kept - sum(own.buckets[index].num_bytes for index in loose),
        together=life.peak_together,
        fetched=life.peak_fetched,
        parameters_away=sum(away.values()),
        state_away=_sent_away(own, "state")
        + sum(i.state_bytes for i in own.instructions if isinstance(i, Update)),
        gradients_away=_sent_away(own, "bucket", "shard"),
        last_part=max(
            (
                sum(own.buckets[index].num_bytes for index in i.parts)
                for i in own.instructions
                if isinstance(i, Update) and i.parts and i.lane != "host"
            ),
            default=0 if any(isinstance(i, Update) and i.parts for i in own.instructions) else None,
        ),
    )


def _parameter_bytes(program: Program, rank: int) -> int:
    """What a rank holds of the parameters."""
    own, layout, coordinates = program.of(rank), program.layout, program.layout.coordinates(rank)
    if layout.groups:
        return sum(
            (group.num_elements if layout.zero < 3 else group.chunk_elements) * group.dtype.itemsize
            for group in layout.groups
            if program.plan.mesh.coordinate(rank, PIPE) in group.owners or not layout.owners
        )
    itemsize = {
        value.name: spec.dtype.itemsize for value, spec in own.values.items() if value.kind == "parameter"
    }
    return sum(
        torch.Size(layout.local_shape(name, coordinates)).numel() * itemsize.get(name, 4)
        for name in layout.parameters
        if layout.is_held(name, rank)
    )


def _sent_away(own: RankProgram, *kinds: ValueKind) -> int:
    """Bytes of values that go to the host."""
    copies = (i for i in own.instructions if isinstance(i, Copy) and i.way == "out")
    return sum(i.num_bytes for i in copies if i.reads[0].kind in kinds)


def at_hand_bytes(own: RankProgram) -> int:
    """Most at once of all that was fetched from the host."""
    alive: dict[Value, int] = {}
    most = 0
    for instruction in own.instructions:
        if isinstance(instruction, Copy):
            if instruction.way == "in":
                alive[instruction.writes[0]] = instruction.num_bytes
                most = max(most, sum(alive.values()))
            else:
                alive.pop(instruction.reads[0], None)
    return most


def _server_memory(program: Program, own: RankProgram) -> StepMemory:
    """A server holds its part of the weights, and of what workers have sent and was not applied yet."""
    held = sum(bucket.num_bytes for bucket in own.buckets or own.averages) // program.plan.sync.servers
    pending = held * program.plan.mesh.size * (1 + program.plan.sync.staleness)
    return StepMemory(
        parameters=held,
        gradients=held if own.buckets else 0,
        travelling=pending,
        gathered=0,
        activations=0,
        flat_gradients=held if own.buckets else 0,
        together=0,
    )


class _Life:
    """Follows the instructions of a step and adds up what is alive."""

    def __init__(self, own: RankProgram, loose: frozenset[int], in_place: frozenset[Storage]) -> None:
        self.own = own
        self.in_place = in_place
        """Storages that are parts of buckets."""
        self.loose = loose
        """Buckets whose gradients stay as they came."""
        self.holders: dict[Storage, set[Value]] = {}
        """Storage -> the values that show it."""
        self.now = 0
        self.peak = 0
        self.gathered: dict[Value, int] = {}
        self.peak_gathered = 0
        self.loose_bytes = 0
        self.fetched: dict[Value, int] = {}
        self.peak_fetched = 0
        self.peak_together = 0

    def live(self, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            self._compute(instruction)
        elif isinstance(instruction, Accumulate):
            self._drop(instruction.frees)
            if instruction.fresh and instruction.bucket in self.loose:
                self.loose_bytes += self.own.buckets[instruction.bucket].num_bytes
                self.peak_together = max(self.peak_together, self.now + self.loose_bytes)
        elif isinstance(instruction, Copy):
            self._copy(instruction)
        elif isinstance(instruction, Update) and instruction.parts:  # what it used is given up at once
            if instruction.lane != "host":
                self._give_up(instruction.parts)
        else:
            is_gather = (
                isinstance(instruction, Collective)
                and instruction.source is not None
                and instruction.source.kind == "chunk"
            )
            for name in instruction.writes:
                if is_gather and name in self.own.values:
                    self.gathered[name] = self.own.values[name].num_bytes
                self._show(name, self.own.storages.get(name, ()))
            self.peak_gathered = max(self.peak_gathered, sum(self.gathered.values()))
        self._drop(instruction.frees)

    def _copy(self, instruction: Copy) -> None:
        """What comes has memory of its own until it leaves; activations that come again are as if they were made."""
        if instruction.way == "in":
            lasting = [value for value in instruction.writes if not self.own.storages.get(value)]
            if lasting:
                self.fetched[lasting[0]] = instruction.num_bytes
            for value in instruction.writes:
                self._show(value, self.own.storages.get(value, ()))
        else:
            self.fetched.pop(instruction.reads[0], None)
            self._give_up([value.number for value in instruction.reads if value.kind == "bucket"])
        self.peak_fetched = max(self.peak_fetched, sum(self.fetched.values()))

    def _give_up(self, buckets: Iterable[int]) -> None:
        """Gradients that stayed as they came are gone."""
        self.loose_bytes -= sum(self.own.buckets[index].num_bytes for index in buckets if index in self.loose)

    def _compute(self, instruction: Compute) -> None:
        segment = self.own.segments[instruction.segment]
        names = dict(zip(segment.inputs, instruction.reads, strict=True))
        names |= dict(zip(segment.outputs, instruction.writes, strict=True))
        freed, number = set(instruction.frees), instruction.micro_batch
        assert number is not None
        for node, dying in segment.steps:
            name = names.get(node) or Value.node(node, number)
            if node in segment.over:
                self._drop([Value.node(segment.over[node], number)])
            self._show(name, self.own.storages.get(name, ()))
            self._drop(
                names.get(other) or Value.node(other, number)
                for other in dying
                if other not in names or names[other] in freed
            )

    def _show(self, value: Value, storages: Iterable[Storage]) -> None:
        if value.kind in _UNSEEN:
            return
        for storage in storages:
            if storage in self.in_place:
                continue
            if storage not in self.holders:
                self.holders[storage] = set()
                self.now += storage.num_bytes
            self.holders[storage].add(value)
        self.peak = max(self.peak, self.now)
        self.peak_together = max(self.peak_together, self.now + self.loose_bytes)

    def _drop(self, values: Iterable[Value]) -> None:
        for value in values:
            self.gathered.pop(value, None)
            for storage in self.own.storages.get(value, ()):
                held = self.holders.get(storage)
                if held is not None:
                    held.discard(value)
                    if not held:
                        del self.holders[storage]
                        self.now -= storage.num_bytes


def storages_of(nodes: Iterable[fx.Node], values: Mapping[str, Value]) -> dict[Value, tuple[Storage, ...]]:
    """The memory that each node of a local graph shows, by its value."""
    found: dict[Value, tuple[Storage, ...]] = {}
    of: dict[fx.Node, tuple[Storage, ...]] = {}
    for node in nodes:
        made, value = node.meta.get("val"), values[node.name]
        if value.kind in _UNSEEN:
            of[node] = ()
        elif node.op == "call_function" and shows_input(node):
            of[node] = of[node.all_input_nodes[0]]
        elif node.op == "call_function" and is_item(node):
            index: Any = node.args[1]
            of[node] = of[node.all_input_nodes[0]][index : index + 1]
        elif isinstance(made, torch.Tensor):
            of[node] = (Storage(value, storage_bytes(made)),)
        elif isinstance(made, (tuple, list)):
            of[node] = tuple(
                Storage(value, storage_bytes(one) if isinstance(one, torch.Tensor) else 0, i)
                for i, one in enumerate(made)
            )
        else:
            of[node] = ()
        found[value] = of[node]
    return found
