"""Write down one step of one rank as instructions.

In: the pieces of each micro-batch. Out: a `RankProgram`. The order is that of a synchronous step: weights, then every
micro-batch forward and backward, buckets sent as soon as the last micro-batch has filled them, then the update.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from plait.graph.graph import Graph
from plait.job.updates.clip import Clip
from plait.plan.plan import DATA, Plan
from plait.program.instructions import Collective, Commit, Compute, Load, Tally, Tangent
from plait.program.layout import Layout
from plait.program.local.communicate import bytes_sent
from plait.program.local.local_graph import LocalGraph
from plait.program.place.placement import Partial
from plait.program.program import Bucket, RankProgram, Segment
from plait.program.segment.buckets import bucket_reads
from plait.program.segment.cut import Await, Piece, Reached, Start
from plait.program.segment.gathers import Fetch
from plait.program.value import TANGENT, WEIGHT, Value
from plait.program.write.frees import with_frees
from plait.program.write.gradient_writer import GradientWriter
from plait.program.write.push_pull import ServerSide, in_order_of_use
from plait.program.write.spill import Away, with_offload
from plait.program.write.step_values import StepValues
from plait.program.write.writer import Writer


class StepBuilder:
    """Collects micro-batches, then writes the instructions of the step."""

    def __init__(
        self,
        plan: Plan,
        buckets: tuple[Bucket, ...],
        layout: Layout,
        clip: Clip,
        device: torch.device,
        coordinate: int = 0,
        away: Away | None = None,
    ) -> None:
        self.coordinate = coordinate
        """On `pipe`."""
        self.away = away
        """What lies on the host; None: nothing."""
        self.plan = plan
        self.buckets = buckets
        self.layout = layout
        self.clip = clip
        self.device = device
        self.micro: list[tuple[Graph, LocalGraph, list[Piece], list[Piece], int]] = []
        self.writer = Writer()
        self.segments: dict[str, Segment] = {}
        self.known = StepValues(own_tangents=plan.pipe.asynchronous)
        self.value_of, self.tangent = self.known.of, self.known.tangent
        self.values, self.storages = self.known.specs, self.known.storages
        self.started: dict[Value, int] = {}
        self.gradients = GradientWriter(self)
        self.servers = ServerSide(buckets, self.writer) if plan.agreement.weights == "server" else None

    def add_micro_batch(
        self, graph: Graph, local: LocalGraph, early: list[Piece], rest: list[Piece], number: int
    ) -> None:
        """The next micro-batch of the step."""
        self.micro.append((graph, local, early, rest, number))
        for piece in (*early, *rest):
            if isinstance(piece, Segment):
                self.segments[piece.name] = piece
        self.known.describe(graph, local, number)

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

    @property
    def late_weight(self) -> bool:
        """Whether the weight of the step is known only with its gradients; so it is of a model that runs eagerly."""
        if not self.micro:
            return True
        first = self.micro[0][0]
        return first.static_weight is None and not first.weight_is_early

    def close(self, after: Callable[[], None] | None = None) -> RankProgram:
        """Sums, norm and update at the end of the step, what comes `after`, and values freed after their last use."""
        self.gradients.finish()
        if after is not None:
            after()
        instructions = self.writer.instructions
        if self.away is not None:
            instructions = with_offload(
                instructions, self.plan, self.buckets, self.layout, self.known, self.away
            )
        return RankProgram(
            instructions=tuple(with_frees(instructions, fetched=self.layout.zero == 3)),
            buckets=self.buckets,
            segments=self.segments,
            values=self.values,
            constants=self.known.constants,
            storages=self.storages,
            shows=self.known.shows,
        )

    def load(self, graph: Graph, number: int) -> None:
        entries = (*graph.inputs_of("batch"), *graph.inputs_of("key"))
        writes = tuple(self.value_of(graph, entry.node, number) for entry in entries)
        self.writer.add(Load(name=f"load {number}", writes=writes, micro_batch=number))

    def weights(self) -> int | None:
        """Compute the step's weight before the forward where it comes from the batch; None: loads are not done yet."""
        graphs = [graph for graph, *_ in self.micro]
        if all(graph.static_weight is not None for graph in graphs):
            weight = float(sum(graph.static_weight or 0.0 for graph in graphs))
            self.writer.add(Tangent(name="tangent", kind="forward", writes=(TANGENT,), weight=weight))
            return None
        if not graphs[0].weight_is_early:
            self.writer.add(Tangent(name="tangent", kind="forward", writes=(TANGENT,), weight=1.0))
            return None
        names = []
        for graph, local, early, _, number in self.micro:
            self.load(graph, number)
            self.pieces(graph, early, number, {})
            names.append(self.value_of(graph, local.weight, number))
        self.writer.add(
            Tally(name="weight of the step", kind="forward", reads=tuple(names), writes=(WEIGHT,))
        )
        local = self.micro[0][1]
        axes = [
            axis.name
            for axis, placement in zip(self.layout.axes, local.weight_placement, strict=True)
            if axis.size > 1 and isinstance(placement, Partial)
        ]
        if axes:
            self.start(WEIGHT, "+".join(axes), None, 8)
        return self.started.get(WEIGHT, -1)

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
                self.wait(WEIGHT, None)
            self.tangent_of_weight()
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
            self.commit(graph, local.new_buffers, number)
            if last and self.servers is not None:
                self.servers.push_buffers(tuple(local.new_buffers))

    def tangent_of_weight(self) -> None:
        """The factor of all gradients, from the weight of the step."""
        self.writer.add(
            Tangent(name="tangent", kind="forward", reads=(WEIGHT,), writes=(TANGENT,), weight=None)
        )

    def commit(self, graph: Graph, changed: Mapping[str, str], number: int) -> None:
        """Make what a micro-batch computes of buffers, or writes into parameters (name -> node), their values."""
        written = set(graph.written)
        self.writer.add(
            Commit(
                name="commit buffers",
                reads=tuple(self.value_of(graph, node, number) for node in changed.values()),
                writes=tuple(Value.parameter(n) if n in written else Value.buffer(n) for n in changed),
                buffers=tuple(changed),
                micro_batch=number,
            )
        )

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
                self.writer.add(
                    Compute(
                        name=piece.name,
                        kind=piece.phase,
                        segment=piece.name,
                        reads=tuple(self.value_of(graph, name, number) for name in piece.inputs),
                        writes=tuple(self.value_of(graph, name, number) for name in piece.outputs),
                        micro_batch=number,
                    )
                )
            elif isinstance(piece, Start):
                self._start_node(graph, piece.node, number)
            elif isinstance(piece, Await):
                self.wait(self.value_of(graph, piece.node.name, number), number)
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
        return self.writer.add(
            Collective(
                name=f"all_gather parameters {group}",
                op="all_gather",
                axis=DATA,
                extents=(entry.chunk_elements,) * entry.chunks,
                reads=(Value.chunk(group),),
                writes=tuple(map(Value.parameter, entry.parameters)),
                micro_batch=number,
                num_bytes=entry.num_elements * entry.dtype.itemsize,
            )
        )

    def end_gather(self, group: int, started: int, number: int) -> None:
        """Wait until they are there."""
        self.writer.wait(started, f"parameters {group}", number)

    def _start_node(self, graph: Graph, node: torch.fx.Node, number: int) -> None:
        source: Any = node.args[0]
        value = self.value_of(graph, node.name, number)
        op: Any = node.target.__name__  # type: ignore[union-attr]
        details = inspect.signature(node.target).bind(*node.args).arguments  # type: ignore[arg-type]
        fields = {key: details[key] for key in ("dim", "before", "after", "fill") if key in details}
        self.started[value] = self.writer.add(
            Collective(
                name=f"{op} {node.name}",
                op=op,
                axis=details["axis"],
                extents=tuple(details.get("extents", ())),
                **fields,
                reads=(self.value_of(graph, source.name, number),),
                writes=(value,),
                micro_batch=number,
                num_bytes=bytes_sent(op, source, node, fields),
            )
        )

    def start(self, value: Value, axis: str, number: int | None, num_bytes: int) -> None:
        """Begin to sum a value over ranks, in place."""
        self.started[value] = self.writer.all_reduce(value, axis, num_bytes, micro_batch=number)

    def wait(self, value: Value, number: int | None) -> None:
        """Have a value at hand, where it is under way."""
        if value in self.started:
            self.writer.wait(self.started.pop(value), value, number)
