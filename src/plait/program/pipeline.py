"""Write down one step of one rank of a pipeline: its stages' pieces in the order of a schedule, with messages between.

In: per micro-batch the pieces of this rank's stages, the actions of a schedule. Out: instructions, by a `StepBuilder`.
A receive is posted one action before it is needed; values for a stage on the same rank just stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plait.graph.graph import Graph
from plait.plan.plan import PIPE
from plait.program.build import StepBuilder
from plait.program.cut import Piece, cut
from plait.program.instructions import Accumulate, Commit, Recv, Send, Tally, Tangent, Wait
from plait.program.localize import LocalGraph
from plait.program.program import Segment
from plait.program.schedules.base import Action
from plait.program.split import Direction, StageGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePieces:
    """One stage's part of a micro-batch, cut into pieces."""

    graph: StageGraph
    forward: list[Piece]
    backward: list[Piece]
    """Where the schedule keeps the two apart: of `inputs` alone."""
    weights: list[Piece]
    """Of `weights` alone; empty where they are part of `backward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What a rank of a pipeline does with one micro-batch."""

    graph: Graph
    local: LocalGraph
    early: list[Piece]
    stages: Mapping[int, StagePieces]
    number: int


def stage_pieces(
    stage: StageGraph,
    local: LocalGraph,
    ends: Sequence[str],
    prefix: str,
    device: torch.device,
    *,
    apart: bool,
) -> StagePieces:
    """Cut a stage's nodes; `ends` are the last gradients of buckets, `apart`: weights have actions of their own."""
    sent = {
        direction: {name for (d, _), names in stage.sends.items() if d == direction for name in names}
        for direction in ("forward", "backward")
    }
    gradients = set(stage.gradients.values())
    read_later = {used.name for node in stage.backward for used in node.all_input_nodes}
    kept = {*read_later, *sent["forward"], *sent["backward"], *stage.new_buffers.values()}
    kept |= {local.total, local.weight} if stage.has_total else set()
    forward = cut(stage.forward, kept & _names(stage.forward), (), f"{prefix}s{stage.stage}.", device)
    if not apart:
        wanted = (gradients | sent["backward"]) & _names(stage.backward)
        backward = cut(stage.backward, wanted, ends, f"{prefix}s{stage.stage}.b.", device)
        return StagePieces(graph=stage, forward=forward, backward=backward, weights=[])
    read_by_weights = {used.name for node in stage.weights for used in node.all_input_nodes}
    wanted = (read_by_weights | gradients | sent["backward"]) & _names(stage.inputs)
    inputs = cut(stage.inputs, wanted, (), f"{prefix}s{stage.stage}.i.", device)
    weights = cut(
        stage.weights, gradients & _names(stage.weights), ends, f"{prefix}s{stage.stage}.w.", device
    )
    return StagePieces(graph=stage, forward=forward, backward=inputs, weights=weights)


def _names(nodes: Sequence[torch.fx.Node]) -> set[str]:
    return {node.name for node in nodes}


class PipelineWriter:
    """Writes the actions of one rank."""

    def __init__(
        self,
        builder: StepBuilder,
        micro: Sequence[MicroBatch],
        actions: Sequence[Action],
        ranks: int,
        coordinate: int,
    ) -> None:
        self.builder = builder
        self.micro = micro
        self.actions = actions
        self.ranks = ranks
        self.coordinate = coordinate
        self.loaded: set[int] = set()
        self.posted: dict[str, int] = {}
        self.filled: set[int] = set()
        self.last = max(action.micro_batch for action in actions)

    def write(self) -> None:
        """The whole step, without its end."""
        for entry in self.micro:
            self.builder.add_micro_batch(entry.graph, entry.local, entry.early, [], entry.number)
            for stage in entry.stages.values():
                for piece in (*stage.forward, *stage.backward, *stage.weights):
                    if isinstance(piece, Segment):
                        self.builder.segments[piece.name] = piece
        waiting = self.builder.weights()
        if waiting is not None:
            self.loaded = {entry.number for entry in self.micro}
            if waiting >= 0:
                self.builder.wait("weight", None)
            self.builder.add(
                Tangent, "tangent", "forward", reads=("weight",), writes=("tangent",), weight=None
            )
        for position, action in enumerate(self.actions):
            self._post(action)
            if position + 1 < len(self.actions):
                self._post(self.actions[position + 1])
            self._act(action)
        self._nothing_elsewhere()

    def _act(self, action: Action) -> None:
        entry = self.micro[action.micro_batch]
        if action.micro_batch not in self.loaded:
            self.builder.load(entry.graph, entry.number)
            self.loaded.add(action.micro_batch)
        stage = entry.stages[action.stage]
        begin = len(self.builder.instructions)
        if action.kind == "forward":
            self._arrive(action, "forward")
            self.builder.pieces(entry.graph, stage.forward, entry.number, {})
            self._send(entry, stage, "forward")
            self._commit(entry, stage)
            if stage.graph.has_total:
                self._scalars(entry)
        elif action.kind == "weight":
            self._backward(entry, stage, stage.weights)
        else:
            self._arrive(action, "backward")
            self._backward(entry, stage, stage.backward, also_weights=action.kind == "backward")
            self._send(entry, stage, "backward")
        for index in range(begin, len(self.builder.instructions)):
            instruction = self.builder.instructions[index]
            self.builder.instructions[index] = replace(instruction, stage=action.stage)

    def _backward(
        self, entry: MicroBatch, stage: StagePieces, pieces: list[Piece], *, also_weights: bool = True
    ) -> None:
        """Run pieces; where they end a stage's backward, its gradients go into their buckets."""
        number = entry.number
        if not also_weights:
            self.builder.pieces(entry.graph, pieces, number, {})
            return
        own = [
            index
            for index, bucket in enumerate(self.builder.buckets)
            if bucket.parameters and bucket.parameters[0] in stage.graph.gradients
        ]
        local = replace(entry.local, gradients=dict(stage.graph.gradients))
        order = {node.name: index for index, node in enumerate(entry.local.graph.nodes)}
        reached: dict[str, list[int]] = {}
        for index in own:
            names = [stage.graph.gradients[name] for name in self.builder.buckets[index].parameters]
            reached.setdefault(max(names, key=order.__getitem__), []).append(index)
        fresh = not any(index in self.filled for index in own)
        self.builder.pieces(
            entry.graph,
            pieces,
            number,
            reached,
            local=local,
            fresh=fresh,
            send=number == self.last,
            buckets=own,
        )
        self.filled |= set(own)

    def _commit(self, entry: MicroBatch, stage: StagePieces) -> None:
        changed = stage.graph.new_buffers
        if changed:
            self.builder.add(
                Commit,
                "commit buffers",
                "update",
                reads=tuple(
                    self.builder.name_of(entry.graph, node, entry.number) for node in changed.values()
                ),
                writes=tuple(f"buffer:{name}" for name in changed),
                buffers=tuple(changed),
                micro_batch=entry.number,
            )

    def _scalars(self, entry: MicroBatch) -> None:
        scalars = {"total": entry.local.total, "weight": entry.local.weight}
        for index, bucket in enumerate(self.builder.buckets):
            if bucket.scalars:
                reads = tuple(
                    self.builder.name_of(entry.graph, scalars[name], entry.number) for name in bucket.scalars
                )
                self._accumulate(index, reads, entry.number)

    def _accumulate(self, index: int, reads: tuple[str, ...], number: int | None) -> None:
        self.builder.add(
            Accumulate,
            f"bucket {index}",
            "backward",
            reads=reads,
            writes=(f"bucket:{index}",),
            bucket=index,
            fresh=index not in self.filled,
            micro_batch=number,
        )
        self.filled.add(index)

    def _nothing_elsewhere(self) -> None:
        """Ranks that do not compute the loss add nothing to it; then all of them sum it."""
        for index, bucket in enumerate(self.builder.buckets):
            if not bucket.scalars:
                if index not in self.filled:  # tied, and read here without a part of its gradient
                    self.builder.accumulate(index, (), None, fresh=True, send=True)
                continue
            if index not in self.filled:
                self.builder.add(Tally, "no loss here", "update", writes=("nothing",))
                self._accumulate(index, ("nothing",) * len(bucket.scalars), None)
            assert bucket.axis is not None
            self.builder.start(f"bucket:{index}", "all_reduce", bucket.axis, None, bucket.num_bytes)

    def _rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def _messages(self, action: Action, direction: Direction) -> list[tuple[int, tuple[str, ...], str]]:
        """(from which stage, names, message) of what an action receives from other ranks."""
        entry = self.micro[action.micro_batch]
        receives = entry.stages[action.stage].graph.receives
        return [
            (source, names, _message(direction, source, action.stage, action.micro_batch))
            for (way, source), names in receives.items()
            if way == direction and self._rank_of(source) != self.coordinate
        ]

    def _post(self, action: Action) -> None:
        if action.kind == "weight":
            return
        direction: Direction = "forward" if action.kind == "forward" else "backward"
        entry = self.micro[action.micro_batch]
        for source, names, message in self._messages(action, direction):
            if message not in self.posted:
                writes = tuple(self.builder.name_of(entry.graph, name, entry.number) for name in names)
                self.posted[message] = self.builder.add(
                    Recv,
                    f"receive {message}",
                    "communication",
                    lane="communication",
                    axis=PIPE,
                    source=self._rank_of(source),
                    message=message,
                    writes=writes,
                    micro_batch=entry.number,
                    stage=action.stage,
                    num_bytes=sum(self.builder.values[name].num_bytes for name in writes),
                )

    def _arrive(self, action: Action, direction: Direction) -> None:
        entry = self.micro[action.micro_batch]
        for _, names, message in self._messages(action, direction):
            values = tuple(self.builder.name_of(entry.graph, name, entry.number) for name in names)
            self.builder.add(
                Wait,
                f"wait for {message}",
                "wait",
                of=self.posted.pop(message),
                reads=values,
                writes=values,
                micro_batch=entry.number,
            )

    def _send(self, entry: MicroBatch, stage: StagePieces, direction: Direction) -> None:
        for (way, to), names in stage.graph.sends.items():
            if way == direction and self._rank_of(to) != self.coordinate:
                reads = tuple(self.builder.name_of(entry.graph, name, entry.number) for name in names)
                for name in reads:  # what is itself the result of a collective
                    self.builder.wait(name, entry.number)
                message = _message(direction, stage.graph.stage, to, entry.number)
                self.builder.add(
                    Send,
                    f"send {message}",
                    "communication",
                    lane="communication",
                    axis=PIPE,
                    to=self._rank_of(to),
                    message=message,
                    reads=reads,
                    micro_batch=entry.number,
                    num_bytes=sum(self.builder.values[name].num_bytes for name in reads),
                )


def _message(direction: Direction, source: int, to: int, number: int) -> str:
    return f"{direction} {source}>{to} micro-batch {number}"
