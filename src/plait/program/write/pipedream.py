"""Asynchronous 1F1B with weight stashing (PipeDream; Narayanan et al. 2019): every micro-batch is an update of its own.

In: what `PipelineWriter` is about to do on one rank. Out: the instructions that this adds: a tangent per micro-batch,
an update after each of its backwards, and copies of weights that a later backward still needs. A step is a round of
micro-batches without a flush between them; it ends with one, where losses are read and checkpoints are written.
What cannot be had without a flush is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, fx

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.job.updates.clip import Clip
from plait.plan.plan import PIPE, Plan
from plait.program.cost.memory import storages_of
from plait.program.instructions import Stash, Tally, Tangent, Update
from plait.program.local.local_graph import LocalGraph
from plait.program.place.placement import Partial
from plait.program.program import Segment, Storage
from plait.program.segment.cut import Piece, Start
from plait.program.segment.recompute import Again, forward_nodes, frontier, recompute
from plait.program.segment.stage_pieces import MicroBatch
from plait.program.stage.schedules.base import Action
from plait.program.stage.versions import version_read
from plait.program.stage.where import Stages
from plait.program.value import WEIGHT, Value
from plait.program.write.build import StepBuilder
from plait.torch_private import pytree

_SYNCHRONOUS = "use the plan 1f1b, which updates once a step"


def check_suits(plan: Plan, graphs: Mapping[int, Graph], clip: Clip, stages: Mapping[int, Stages]) -> None:
    """Refuse what needs all stages at once before an update."""
    if not stages:
        raise PlanError(
            f"plan {plan.name} needs stages; the mesh has pipe={plan.mesh.size_of(PIPE)}.",
            fix="use 2 or more ranks on pipe, or the plan single.",
        )
    if plan.pipe.per_rank != 1:
        raise PlanError(
            f"plan {plan.name} has one stage a rank; pipe.per_rank is {plan.pipe.per_rank}.",
            fix="set pipe.per_rank=1, or use the plan interleaved.",
        )
    if clip.norms:
        told = ", ".join(
            f"{norm:g}" if pattern == "*" else f"{pattern}: {norm:g}" for pattern, norm in clip.norms
        )
        raise PlanError(
            f"clip_norm={told} needs the gradients of all stages before each update; plan {plan.name} updates "
            "stages one after the other.",
            fix=f"drop clip_norm, or {_SYNCHRONOUS}.",
        )
    if plan.memory.zero > 0 and plan.data_ranks > 1:
        raise PlanError(
            f"memory.zero={plan.memory.zero} would gather the parameters of a stage after each of its updates.",
            fix=f"set memory.zero=0, or {_SYNCHRONOUS}.",
        )
    for size, graph in graphs.items():
        if graph.static_weight is None and not graph.weight_is_early:
            raise PlanError(
                "what the loss is divided by is known only after the last stage; an update of the first cannot wait "
                "for it.",
                fix=f"return (total, weight) with a weight that follows from the batch, or {_SYNCHRONOUS}.",
            )
        for name, where in stages[size].parameters.items():
            if len(where) > 1 and name in graph.gradients:
                raise PlanError(
                    f"{name} is used by the stages {list(where)}, which update at different times.",
                    fix=f"set pipe.cut so that one stage has all its uses, or {_SYNCHRONOUS}.",
                )


def shows_again(source: Graph, local: LocalGraph, stages: Stages | None) -> LocalGraph:
    """Let the backward take its own views of parameters: those of the forward show an update in between, or
    memory that is used otherwise by then."""
    kinds = {entry.node: entry.kind for entry in source.inputs}
    rename = {node.name: Value.node(node.name, 0) for node in local.graph.nodes}
    rename |= {name: Value.parameter(name) for name, kind in kinds.items() if kind in ("parameter", "buffer")}
    shown = storages_of(local.graph.nodes, rename)
    bound = frontier(source, local, stages)
    views = [
        node
        for node in forward_nodes(local)
        if not shown[rename[node.name]] and _has_tensor(node) and node not in bound
    ]
    again = Again(
        nodes=frozenset(node.name for node in views),
        ops={},
        order=tuple(node.name for node in local.graph.nodes),
    )
    return recompute(source, local, again, stages)


def _has_tensor(node: fx.Node) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))


class Updates:
    """Writes what the updates of one rank add to a pipeline; it has one stage."""

    def __init__(
        self,
        builder: StepBuilder,
        micro: Sequence[MicroBatch],
        actions: Sequence[Action],
        seen: Sequence[int],
    ) -> None:
        self.builder = builder
        self.micro = micro
        self.actions = actions
        self.seen = seen
        """The version that each micro-batch sees here."""
        self.done = 0
        """Updates so far: the version of the parameters as they are."""
        self.trained = {name for bucket in builder.buckets for name in bucket.parameters}

    def loaded(self, entry: MicroBatch) -> None:
        """Begin with the weight of a micro-batch where it follows from the batch."""
        if entry.graph.static_weight is not None:
            return
        builder, number = self.builder, entry.number
        builder.pieces(entry.graph, entry.early, number, {})
        weight = Value.scalar("weight", number)
        builder.writer.add(
            Tally(
                name=f"weight of {number}", kind="forward", writes=(weight,), micro_batch=number,
                reads=(builder.value_of(entry.graph, entry.local.weight, number),),
            )
        )  # fmt: skip
        axes = [
            axis.name
            for axis, placement in zip(builder.layout.axes, entry.local.weight_placement, strict=True)
            if axis.size > 1 and isinstance(placement, Partial)
        ]
        if axes:
            builder.start(weight, "+".join(axes), number, 8)

    def tangent(self, entry: MicroBatch) -> None:
        """The factor of a micro-batch's gradients, before its backward."""
        weight, known = Value.scalar("weight", entry.number), entry.graph.static_weight
        self.builder.wait(weight, entry.number)
        self.builder.writer.add(
            Tangent(
                name=f"tangent {entry.number}", kind="backward", reads=(weight,) if known is None else (),
                writes=(self.builder.tangent(entry.number),), weight=known, micro_batch=entry.number,
            )
        )  # fmt: skip

    def before_send(self, entry: MicroBatch, values: Sequence[Value]) -> None:
        """Copy what shows a parameter: the message may leave after the next update."""
        builder = self.builder
        views = tuple(value for value in values if not builder.storages.get(value))
        if views:
            builder.storages |= {view: (Storage(view, builder.values[view].num_bytes),) for view in views}
            builder.writer.add(
                Stash(
                    name="copy for a message", kind="forward", reads=views, writes=views, version=None,
                    micro_batch=entry.number,
                )
            )  # fmt: skip

    def after(self, action: Action, position: int, begin: int) -> None:
        """Turn the instructions since `begin` to the version of their micro-batch; update after a backward."""
        version = self.seen[action.micro_batch]
        if version != self.done:
            written = self.builder.writer.instructions
            for index in range(begin, len(written)):
                instruction = written[index]
                reads = tuple(self._older(value, version) for value in instruction.reads)
                written[index] = replace(instruction, reads=reads)
        if action.kind == "forward":
            return
        buckets = [Value.bucket(i) for i, bucket in enumerate(self.builder.buckets) if bucket.parameters]
        for bucket in buckets:
            self.builder.wait(bucket, action.micro_batch)
        self._stash(action, position)
        self.builder.writer.add(
            Update(name=f"update {self.done}", reads=tuple(buckets), micro_batch=action.micro_batch)
        )
        self.done += 1

    def end(self) -> None:
        """The weight of the whole round, for its loss."""
        late = [entry.number for entry in self.micro if entry.graph.static_weight is None]
        if late:
            reads = tuple(Value.scalar("weight", number) for number in late)
            self.builder.writer.add(
                Tally(name="weight of the round", kind="update", reads=reads, writes=(WEIGHT,))
            )

    def _older(self, value: Value, version: int) -> Value:
        read = version_read(value, self.done)
        return Value.stash(read[0], version) if read is not None and read[0] in self.trained else value

    def _stash(self, action: Action, position: int) -> None:
        """Copy what the coming update overwrites and a later action reads."""
        builder = self.builder
        needed: dict[str, None] = {}
        for later in self.actions[position + 1 :]:
            if self.seen[later.micro_batch] == self.done:
                entry = self.micro[later.micro_batch]
                stage = entry.stages[later.stage]
                pieces = stage.forward if later.kind == "forward" else stage.backward
                needed |= dict.fromkeys(self._parameters(entry, pieces))
        if not needed:
            return
        reads = tuple(map(Value.parameter, needed))
        writes = tuple(Value.stash(name, self.done) for name in needed)
        for parameter, stash in zip(reads, writes, strict=True):
            builder.values[stash] = builder.values[parameter]
            builder.storages[stash] = (Storage(stash, builder.values[stash].num_bytes),)
        builder.writer.add(
            Stash(
                name=f"stash version {self.done}", kind="update", reads=reads, writes=writes, version=self.done,
                micro_batch=action.micro_batch,
            )
        )  # fmt: skip

    def _parameters(self, entry: MicroBatch, pieces: Sequence[Piece]) -> list[str]:
        """Trained parameters that pieces read."""
        found = []
        for piece in pieces:
            inputs: Sequence[str] = ()
            if isinstance(piece, Segment):
                inputs = piece.inputs
            elif isinstance(piece, Start):
                inputs = [used.name for used in piece.node.all_input_nodes]
            for name in inputs:
                read = version_read(self.builder.value_of(entry.graph, name, entry.number), self.done)
                if read is not None and read[0] in self.trained:
                    found.append(read[0])
        return found
