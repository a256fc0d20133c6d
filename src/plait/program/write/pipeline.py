"""Write down one step of one rank of a pipeline: its stages' pieces in the order of a schedule, with messages between.

In: per micro-batch the pieces of this rank's stages, the actions of a schedule. Out: instructions, by a `StepBuilder`.
A receive is posted one action before it is needed, or earlier: those from one rank in the order in which it sends.
Values for a stage on the same rank just stay.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.plan.plan import PIPE
from plait.program.instructions import Recv, Send, Tally
from plait.program.program import Segment
from plait.program.segment.cut import Piece
from plait.program.segment.gathers import groups_by_input
from plait.program.segment.stage_pieces import MicroBatch, StagePieces
from plait.program.stage.schedules.base import Action
from plait.program.stage.schedules.messages import Direction, Inbox, Message, direction_of
from plait.program.value import NOTHING, WEIGHT, Value
from plait.program.write.build import StepBuilder
from plait.program.write.pipedream import Updates


class PipelineWriter:
    """Writes the actions of one rank."""

    def __init__(
        self,
        builder: StepBuilder,
        micro: Sequence[MicroBatch],
        schedule: Sequence[Sequence[Action]],
        coordinate: int,
        updates: Updates | None = None,
    ) -> None:
        self.updates = updates
        """Where every micro-batch is an update of its own."""
        self.builder, self.writer = builder, builder.writer
        self.micro = micro
        self.actions = actions = schedule[coordinate]
        self.ranks = len(schedule)
        self.coordinate = coordinate
        self.loaded: set[int] = set()
        self.posted: dict[Message, int] = {}
        self.filled: set[int] = set()
        self.to_come = Counter(
            index
            for action in actions
            if action.kind in ("backward", "weight")
            for index in self._filled_by(micro[action.micro_batch].stages[action.stage])
        )
        """Bucket -> how often it will still be filled, by each of this rank's stages that has a part."""
        self.inbox = Inbox((m for action in actions for m in self._messages(action)), schedule)
        self.gathers: dict[int, int] = {}
        """Groups of parameters on their way, and the instruction that fetches them."""

    def write(self) -> None:
        """The whole step, without its end."""
        for entry in self.micro:
            self.builder.add_micro_batch(entry.graph, entry.local, entry.early, [], entry.number)
            for stage in entry.stages.values():
                for piece in (*stage.forward, *stage.backward, *stage.weights):
                    if isinstance(piece, Segment):
                        self.builder.segments[piece.name] = piece
        waiting = self.builder.weights() if self.updates is None else None
        if waiting is not None:
            self.loaded = {entry.number for entry in self.micro}
            if waiting >= 0:
                self.builder.wait(WEIGHT, None)
            self.builder.tangent_of_weight()
        self._gather()
        for position, action in enumerate(self.actions):
            self._post(action)
            if position + 1 < len(self.actions):
                self._post(self.actions[position + 1])
            begin = len(self.writer.instructions)
            self._act(action)
            if self.updates is not None:
                self.updates.after(action, position, begin)
            for index in range(begin, len(self.writer.instructions)):
                instruction = self.writer.instructions[index]
                self.writer.instructions[index] = replace(instruction, stage=action.stage)
        if self.updates is not None:
            self.updates.end()
        self._nothing_elsewhere()

    def _gather(self) -> None:
        """Begin to fetch what other ranks of `data` have updated (zero1), in the order in which it is read."""
        entry = self.micro[0]
        for number in sorted(entry.stages):
            stage = entry.stages[number]
            for group in self._groups(entry, (*stage.forward, *stage.backward, *stage.weights)):
                if group not in self.gathers:
                    self.gathers[group] = self.builder.start_gather(group, 0)

    def _groups(self, entry: MicroBatch, pieces: Sequence[Piece]) -> list[int]:
        of = groups_by_input(entry.graph, self.builder.layout)
        read = [name for piece in pieces if isinstance(piece, Segment) for name in piece.inputs if name in of]
        return list(dict.fromkeys(of[name] for name in read))

    def _run(self, entry: MicroBatch, pieces: list[Piece], **options: Any) -> None:
        """Run pieces; their parameters are at hand."""
        if self.gathers:
            for group in self._groups(entry, pieces):
                if group in self.gathers:
                    self.builder.end_gather(group, self.gathers.pop(group), 0)
        self.builder.pieces(entry.graph, pieces, entry.number, **{"reached": {}, **options})

    def _act(self, action: Action) -> None:
        entry = self.micro[action.micro_batch]
        if action.micro_batch not in self.loaded:
            self.builder.load(entry.graph, entry.number)
            self.loaded.add(action.micro_batch)
            if self.updates is not None:
                self.updates.loaded(entry)
        stage = entry.stages[action.stage]
        if action.kind == "forward":
            self._arrive(action)
            self._run(entry, stage.forward)
            self._send(entry, stage, "forward")
            self._commit(entry, stage)
            if stage.graph.has_total:
                self._scalars(entry)
        elif action.kind == "weight":
            self._backward(entry, stage, stage.weights)
        else:
            if self.updates is not None:
                self.updates.tangent(entry)
            self._arrive(action)
            self._backward(entry, stage, stage.backward, also_weights=action.kind == "backward")
            self._send(entry, stage, "backward")

    def _backward(
        self, entry: MicroBatch, stage: StagePieces, pieces: list[Piece], *, also_weights: bool = True
    ) -> None:
        """Run pieces; where they end a stage's backward, its gradients go into their buckets."""
        if not also_weights:
            self._run(entry, pieces)
            return
        own = self._filled_by(stage)
        local = replace(entry.local, gradients=dict(stage.graph.gradients))
        order = {node.name: index for index, node in enumerate(entry.local.graph.nodes)}
        reached: dict[str, list[int]] = {}
        for index in own:
            names = [stage.graph.gradients[name] for name in self.builder.buckets[index].parameters]
            reached.setdefault(max(names, key=order.__getitem__), []).append(index)
        self.to_come.subtract(own)
        alone = self.updates is not None
        self._run(
            entry,
            pieces,
            reached=reached,
            local=local,
            fresh=[index for index in own if alone or index not in self.filled],
            send=[index for index in own if alone or not self.to_come[index]],
            buckets=own,
        )
        self.filled |= set(own)

    def _filled_by(self, stage: StagePieces) -> list[int]:
        """The buckets of the gradients of which a stage has a part."""
        return [
            index
            for index, bucket in enumerate(self.builder.buckets)
            if bucket.parameters and bucket.parameters[0] in stage.graph.gradients
        ]

    def _commit(self, entry: MicroBatch, stage: StagePieces) -> None:
        changed = stage.graph.new_buffers
        if changed:
            self.builder.commit(entry.graph, changed, entry.number)

    def _scalars(self, entry: MicroBatch) -> None:
        scalars = {"total": entry.local.total, "weight": entry.local.weight}
        for index, bucket in enumerate(self.builder.buckets):
            if bucket.scalars:
                reads = tuple(
                    self.builder.value_of(entry.graph, scalars[name], entry.number) for name in bucket.scalars
                )
                self._accumulate(index, reads, entry.number)

    def _accumulate(self, index: int, reads: tuple[Value, ...], number: int | None) -> None:
        first = index not in self.filled
        self.builder.gradients.put(index, reads, number, fresh=first, begins=first)
        self.filled.add(index)

    def _nothing_elsewhere(self) -> None:
        """Ranks that do not compute the loss add nothing to it; then all of them sum it."""
        for index, bucket in enumerate(self.builder.buckets):
            if not bucket.scalars:
                if index not in self.filled:  # tied, and read here without a part of its gradient
                    self.builder.gradients.accumulate(index, (), None, fresh=True, send=True)
                continue
            if index not in self.filled:
                self.writer.add(Tally(name="no loss here", kind="update", writes=(NOTHING,)))
                self._accumulate(index, (NOTHING,) * len(bucket.scalars), None)
            assert bucket.axis is not None
            self.builder.start(Value.bucket(index), bucket.axis, None, bucket.num_bytes)

    def _rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def _messages(self, action: Action) -> list[Message]:
        """What an action receives from other ranks."""
        receives = self.micro[action.micro_batch].stages[action.stage].graph.receives
        return [
            Message(way, source, action.stage, action.micro_batch)
            for way, source in receives
            if way == direction_of(action) and self._rank_of(source) != self.coordinate
        ]

    def _post(self, action: Action) -> None:
        for needed in self._messages(action):
            for message in self.inbox.up_to(needed):
                self.posted[message] = self._receive(message)

    def _receive(self, message: Message) -> int:
        entry = self.micro[message.micro_batch]
        names = entry.stages[message.to].graph.receives[message.direction, message.source]
        writes = tuple(self.builder.value_of(entry.graph, name, entry.number) for name in names)
        return self.writer.add(
            Recv(
                name=f"receive {message}",
                axis=PIPE,
                source=self._rank_of(message.source),
                message=str(message),
                writes=writes,
                micro_batch=entry.number,
                stage=message.to,
                num_bytes=sum(self.builder.values[value].num_bytes for value in writes),
            )
        )

    def _arrive(self, action: Action) -> None:
        for message in self._messages(action):
            self.writer.wait(self.posted.pop(message), message, self.micro[action.micro_batch].number)

    def _send(self, entry: MicroBatch, stage: StagePieces, direction: Direction) -> None:
        for (way, to), names in stage.graph.sends.items():
            if way == direction and self._rank_of(to) != self.coordinate:
                reads = tuple(self.builder.value_of(entry.graph, name, entry.number) for name in names)
                for value in reads:  # what is itself the result of a collective
                    self.builder.wait(value, entry.number)
                if self.updates is not None:
                    self.updates.before_send(entry, reads)
                message = Message(direction, stage.graph.stage, to, entry.number)
                self.writer.add(
                    Send(
                        name=f"send {message}",
                        axis=PIPE,
                        to=self._rank_of(to),
                        message=str(message),
                        reads=reads,
                        micro_batch=entry.number,
                        num_bytes=sum(self.builder.values[value].num_bytes for value in reads),
                    )
                )
