"""Write down one step of one rank as instructions.

In: the pieces of each micro-batch. Out: a `RankProgram`. The order is that of a synchronous step: weights, then every
micro-batch forward and backward, buckets sent as soon as the last micro-batch has filled them, then the update.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from plait.graph.cost import value_bytes
from plait.graph.graph import Graph, Input
from plait.plan.plan import DATA, Plan
from plait.program.cost.memory import storages_of
from plait.program.instructions import (
    Collective,
    Commit,
    Compute,
    Instruction,
    Load,
    Tally,
    Tangent,
    Wait,
)
from plait.program.layout import Layout
from plait.program.local.localize import LocalGraph
from plait.program.place.placement import Partial
from plait.program.program import Bucket, RankProgram, Segment, Storage, Value
from plait.program.segment.buckets import bucket_reads
from plait.program.segment.cut import Await, Piece, Reached, Start
from plait.program.segment.gathers import Fetch
from plait.program.write.frees import with_frees
from plait.program.write.gradient_writer import GradientWriter
from plait.program.write.push_pull import ServerSide, in_order_of_use


class StepBuilder:
    """Collects micro-batches, then writes the instructions of the step."""

    def __init__(
        self,
        plan: Plan,
        buckets: tuple[Bucket, ...],
        layout: Layout,
        clip_norm: float | None,
        device: torch.device,
        coordinate: int = 0,
    ) -> None:
        self.coordinate = coordinate
        """On `pipe`."""
        self.plan = plan
        self.buckets = buckets
        self.layout = layout
        self.clip_norm = clip_norm
        self.device = device
        self.micro: list[tuple[Graph, LocalGraph, list[Piece], list[Piece], int]] = []
        self.instructions: list[Instruction] = []
        self.segments: dict[str, Segment] = {}
        self.values: dict[str, Value] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.storages: dict[str, tuple[Storage, ...]] = {}
        self.started: dict[str, int] = {}
        self.names: dict[int, dict[str, Input]] = {}
        self.gradients = GradientWriter(self)
        self.servers = ServerSide(buckets, self.add) if plan.sync.has_servers else None

    def add_micro_batch(
        self, graph: Graph, local: LocalGraph, early: list[Piece], rest: list[Piece], number: int
    ) -> None:
        """The next micro-batch of the step."""
        self.micro.append((graph, local, early, rest, number))
        for piece in (*early, *rest):
            if isinstance(piece, Segment):
                self.segments[piece.name] = piece
        self._describe(graph, local, number)

    def finish(self) -> RankProgram:
        """The instructions of a step that takes one micro-batch after the other."""
        if self.servers is not None:
            self.servers.pull(in_order_of_use(self.micro[0][0], self.buckets, self.micro[0][3]))
        waiting = self.weights()
        for position, (graph, local, _, rest, number) in enumerate(self.micro):
            if waiting is None:
                self.load(graph, number)
            self._micro_batch(graph, local, rest, number, position, waiting)
            waiting = waiting if waiting is None else -1
        return self.close()

    def close(self) -> RankProgram:
        """Sums, norm and update at the end of the step, and the values freed after their last use."""
        self.gradients.finish()
        return RankProgram(
            instructions=tuple(with_frees(self.instructions, fetched=self.layout.zero == 3)),
            buckets=self.buckets,
            segments=self.segments,
            values=self.values,
            constants=self.constants,
            storages=self.storages,
        )

    def add(self, cls: Any, name: str, kind: str, **fields: Any) -> int:
        instruction = cls(id=len(self.instructions), name=name, kind=kind, **fields)
        self.instructions.append(instruction)
        return instruction.id  # type: ignore[no-any-return]

    def load(self, graph: Graph, number: int) -> None:
        names = [f"{number}/{entry.name}" for entry in (*graph.inputs_of("batch"), *graph.inputs_of("key"))]
        self.add(Load, f"load {number}", "data", writes=tuple(names), micro_batch=number)

    def weights(self) -> int | None:
        """Compute the step's weight before the forward where it comes from the batch; None: loads are not done yet."""
        graphs = [graph for graph, *_ in self.micro]
        if all(graph.static_weight is not None for graph in graphs):
            weight = float(sum(graph.static_weight or 0.0 for graph in graphs))
            self.add(Tangent, "tangent", "forward", writes=("tangent",), weight=weight)
            return None
        if not graphs[0].weight_is_early:
            self.add(Tangent, "tangent", "forward", writes=("tangent",), weight=1.0)
            return None
        names = []
        for graph, local, early, _, number in self.micro:
            self.load(graph, number)
            self.pieces(graph, early, number, {})
            names.append(self.name_of(graph, local.weight, number))
        self.add(Tally, "weight of the step", "forward", reads=tuple(names), writes=("weight",))
        local = self.micro[0][1]
        axes = [
            axis.name
            for axis, placement in zip(self.layout.axes, local.weight_placement, strict=True)
            if axis.size > 1 and isinstance(placement, Partial)
        ]
        if axes:
            self.start("weight", "all_reduce", "+".join(axes), None, 8)
        return self.started.get("weight", -1)

    def _micro_batch(
        self,
        graph: Graph,
        local: LocalGraph,
        rest: list[Piece],
        number: int,
        position: int,
        waiting: int | None,
    ) -> None:
        last, every = position == len(self.micro) - 1, range(len(self.buckets))
        reached = self._bucket_ends(graph, local)
        fetch = Fetch(self, graph, rest, number, position)
        if position == 0 and waiting is not None:
            index = next(
                (i for i, p in enumerate(rest) if isinstance(p, Segment) and p.phase == "backward"), len(rest)
            )
            self.pieces(graph, rest[:index], number, {}, fetch=fetch)
            if waiting >= 0:
                self.wait("weight", None)
            self.add(Tangent, "tangent", "forward", reads=("weight",), writes=("tangent",), weight=None)
            rest = rest[index:]
        self.pieces(
            graph,
            rest,
            number,
            reached,
            fetch=fetch,
            local=local,
            fresh=every if position == 0 else (),
            send=every if last else (),
        )
        if local.new_buffers:
            names = tuple(local.new_buffers)
            reads = tuple(self.name_of(graph, node, number) for node in local.new_buffers.values())
            writes = tuple(f"buffer:{name}" for name in names)
            self.add(
                Commit,
                "commit buffers",
                "update",
                reads=reads,
                writes=writes,
                buffers=names,
                micro_batch=number,
            )
            if last and self.servers is not None:
                self.servers.push_buffers(names)

    def _bucket_ends(self, graph: Graph, local: LocalGraph) -> dict[str, list[int]]:
        order = {node.name: index for index, node in enumerate(local.graph.nodes)}
        ends: dict[str, list[int]] = {}
        for index in range(len(self.buckets)):
            names = bucket_reads(graph, local, self.buckets, index)
            if names:
                ends.setdefault(max(names, key=order.__getitem__), []).append(index)
        return ends

    def pieces(
        self,
        graph: Graph,
        pieces: Sequence[Piece],
        number: int,
        reached: dict[str, list[int]],
        *,
        fetch: Fetch | None = None,
        local: LocalGraph | None = None,
        fresh: Collection[int] = (),
        send: Collection[int] = (),
        buckets: Sequence[int] | None = None,
    ) -> None:
        """Run pieces of a micro-batch; with `local`, gradients go into `buckets` (None: all) as they are reached.

        `fresh` are the buckets that are empty before, `send` those that are full after.
        """
        done: set[int] = set()
        for piece in pieces:
            if isinstance(piece, Segment):
                if fetch is not None:
                    fetch.before(piece)
                if self.servers is not None:
                    self.servers.wait(in_order_of_use(graph, self.buckets, [piece]), number)
                self.add(
                    Compute,
                    piece.name,
                    piece.phase,
                    segment=piece.name,
                    reads=tuple(self.name_of(graph, name, number) for name in piece.inputs),
                    writes=tuple(self.name_of(graph, name, number) for name in piece.outputs),
                    micro_batch=number,
                )
            elif isinstance(piece, Start):
                self._start_node(graph, piece.node, number)
            elif isinstance(piece, Await):
                self.wait(self.name_of(graph, piece.node.name, number), number)
            elif isinstance(piece, Reached) and local is not None:
                for index in reached.get(piece.node, []):
                    self.gradients.fill(graph, local, index, number, index in fresh, index in send)
                    done.add(index)
        if local is not None:
            for index in range(len(self.buckets)) if buckets is None else buckets:
                if index not in done:
                    self.gradients.fill(graph, local, index, number, index in fresh, index in send)

    def start_gather(self, group: int, number: int) -> int:
        """Begin to fetch the parameters of a group from the ranks that hold them."""
        entry = self.layout.groups[group]
        return self.add(
            Collective,
            f"all_gather parameters {group}",
            "communication",
            lane="communication",
            op="all_gather",
            axis=DATA,
            extents=(entry.chunk_elements,) * entry.chunks,
            reads=(f"chunk:{group}",),
            writes=tuple(f"parameter:{name}" for name in entry.parameters),
            micro_batch=number,
            num_bytes=entry.num_elements * entry.dtype.itemsize,
        )

    def end_gather(self, group: int, started: int, number: int) -> None:
        """Wait until they are there."""
        names = tuple(f"parameter:{name}" for name in self.layout.groups[group].parameters)
        self.add(
            Wait, f"wait for parameters {group}", "wait", of=started, reads=names, writes=names,
            micro_batch=number,
        )  # fmt: skip

    def _start_node(self, graph: Graph, node: torch.fx.Node, number: int) -> None:
        source: Any = node.args[0]
        name = self.name_of(graph, node.name, number)
        op: Any = node.target.__name__  # type: ignore[union-attr]
        details = inspect.signature(node.target).bind(*node.args).arguments  # type: ignore[arg-type]
        fields = {key: details[key] for key in ("dim", "before", "after", "fill") if key in details}
        self.started[name] = self.add(
            Collective,
            f"{op} {node.name}",
            "communication",
            lane="communication",
            op=op,
            axis=details["axis"],
            extents=tuple(details.get("extents", ())),
            **fields,
            reads=(self.name_of(graph, source.name, number),),
            writes=(name,),
            micro_batch=number,
            num_bytes=_bytes_sent(op, source, node, fields),
        )

    def start(self, name: str, op: str, axis: str, number: int | None, num_bytes: int) -> None:
        self.started[name] = self.add(
            Collective,
            f"{op} {name}",
            "communication",
            lane="communication",
            op=op,
            axis=axis,
            reads=(name,),
            writes=(name,),
            micro_batch=number,
            num_bytes=num_bytes,
        )

    def wait(self, name: str, number: int | None) -> None:
        if name in self.started:
            of = self.started.pop(name)
            self.add(
                Wait, f"wait for {name}", "wait", of=of, reads=(name,), writes=(name,), micro_batch=number
            )

    def tangent(self, number: int) -> str:
        """The factor of a micro-batch's gradients: that of the step, or its own where it is an update of its own."""
        return f"tangent:{number}" if self.plan.pipe.asynchronous else "tangent"

    def name_of(self, graph: Graph, local: str, number: int) -> str:
        names = self.names.setdefault(id(graph), {entry.node: entry for entry in graph.inputs})
        entry = names.get(local)
        if entry is not None:
            if entry.kind in ("parameter", "buffer"):
                return f"{entry.kind}:{entry.name}"
            return self.tangent(number) if entry.kind == "tangent" else f"{number}/{entry.name}"
        if local.startswith("offset_"):
            return f"{number}/offset:{local.removeprefix('offset_')}"
        return f"{number}/{local}"

    def _describe(self, graph: Graph, local: LocalGraph, number: int) -> None:
        rename = {node.name: self.name_of(graph, node.name, number) for node in local.graph.nodes}
        self.storages |= storages_of(local.graph.nodes, rename)
        gradients = set(local.gradients.values())
        for node in local.graph.nodes:
            value = node.meta.get("val")
            if node.op == "get_attr":
                self.constants[f"{number}/{node.name}"] = node.meta["constant"]
            if isinstance(value, torch.Tensor):
                kind: Any = "gradient" if node.name in gradients else "activation"
                if node.op == "placeholder":
                    kind = next((e.kind for e in graph.inputs if e.node == node.name), "input")
                    kind = kind if kind in ("parameter", "buffer") else "input"
                self.values[self.name_of(graph, node.name, number)] = Value(
                    kind=kind, shape=tuple(value.shape), dtype=value.dtype, strides=value.stride()
                )


def _bytes_sent(op: str, source: torch.fx.Node, node: torch.fx.Node, fields: Mapping[Any, Any]) -> int:
    """Bytes of the whole that is gathered or summed; of a halo, the rows that change hands."""
    whole = value_bytes((source if op in ("reduce_scatter", "halo_add") else node).meta["val"])
    if op in ("halo", "halo_add"):
        extents = (source if op == "halo_add" else node).meta["val"].shape
        return int(whole * (fields["before"] + fields["after"]) // max(int(extents[fields["dim"]]), 1))
    return whole
