"""Write the graph that one rank runs: local shapes, and communication where placements change.

In: a global graph, the placements chosen on each axis, and the rank's coordinates. Out: a `LocalGraph` whose nodes have
local fake values, with `communicate` nodes where ranks exchange data. Every node's local shape is checked against the
one that its placement demands, so a wrong rule is found here and not by a wrong gradient.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from plait.errors import ProgramError
from plait.graph.graph import Graph
from plait.graph.ops.scaled import gradients_in_short, products_in_short
from plait.graph.rewrite.new_nodes import like_mode
from plait.plan.plan import DATA
from plait.program.local.conversions import Conversion
from plait.program.local.ends import ends_of
from plait.program.local.fakes import Fakes
from plait.program.local.functions import weighted_share
from plait.program.local.local_graph import Change, LocalGraph
from plait.program.local.lowering import Local, Site, lower_node
from plait.program.local.lowerings import REGISTERED as _REGISTERED  # noqa: F401
from plait.program.place.placement import Partial, Placement, R, Replicate, Shard
from plait.program.place.propagate import Placements
from plait.program.stage.where import Stages
from plait.torch_private import pytree


def localize(
    graph: Graph,
    chosen: Sequence[Placements],
    coordinates: Sequence[int],
    *,
    local_batch_norm: bool,
    ends: Sequence[Mapping[str, Placement]] | None = None,
    stages: Stages | None = None,
) -> LocalGraph:
    """The local graph of the rank at `coordinates`; its total, weight and gradients leave as `ends` says, per axis.

    `stages`: conversions are not shared between stages, and gradients leave in the parts that stages compute.
    """
    if ends is None:
        ends = [ends_of(graph, placements) for placements in chosen]
    return _Localizer(graph, tuple(chosen), tuple(coordinates), local_batch_norm, ends, stages).build()


class _Localizer:
    def __init__(
        self,
        graph: Graph,
        chosen: tuple[Placements, ...],
        coordinates: tuple[int, ...],
        local_batch_norm: bool,
        ends: Sequence[Mapping[str, Placement]],
        stages: Stages | None,
    ) -> None:
        self.stages = stages
        self.source = graph
        self.ends = ends
        self.chosen = chosen
        self.axes = tuple(placements.axis for placements in chosen)
        self.coordinates = coordinates
        self.local_batch_norm = local_batch_norm
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Local] = {}
        self.converted: dict[tuple[fx.Node, tuple[Placement, ...], str, object], fx.Node] = {}
        self.current: fx.Node | None = None
        self.mode = like_mode(next(iter(graph.graph.nodes)))
        self.fakes = Fakes(self.mode, graph.known)
        self.offsets: dict[str, fx.Node] = {}
        self.change: Change | None = None
        self.in_short = products_in_short(graph)
        self.gradients = gradients_in_short(self.in_short)
        self.feeds = {
            factor: role
            for factors in self.gradients.values()
            for factor, role in zip(factors, ("gradient", "activation"), strict=True)
        }
        self.shared: dict[tuple[Any, ...], fx.Node] = {}
        self.batch = {entry.node for entry in graph.inputs_of("batch")}

    def build(self) -> LocalGraph:
        nodes = list(self.source.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        for axis in self.axes:
            offset = self.graph.placeholder(f"offset_{axis.name}")
            offset.meta |= {"val": 0, "phase": "forward"}
            self.offsets[axis.name] = offset
        for node in nodes:
            self.current = node
            if node.op == "placeholder":
                self._cut_input(node)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._op(node)
        return self._finish()

    def _placeholder(self, node: fx.Node) -> None:
        """Parameters come as this rank holds them; a batch comes with this rank's samples, and otherwise whole."""
        new = self.graph.placeholder(node.name)
        value = node.meta["val"]
        with self.mode:
            local_value = (
                value.new_empty(self._shape_under(value.shape, self._as_given(node)))
                if isinstance(value, torch.Tensor)
                else value
            )
        new.meta |= {"val": local_value, "phase": "forward", "module": "", "origin": ""}
        self.values[node] = new

    def _as_given(self, node: fx.Node) -> tuple[Placement, ...]:
        placements = tuple(placements.of(node) for placements in self.chosen)
        if node.name not in self.batch:
            return placements
        return tuple(p if axis.name == DATA else R for p, axis in zip(placements, self.axes, strict=True))

    def _cut_input(self, node: fx.Node) -> None:
        have, want = self._as_given(node), tuple(placements.of(node) for placements in self.chosen)
        value = self.values[node]
        if have != want and isinstance(value, fx.Node):
            self.values[node] = self._changed(node, value, have, want)

    def _constant(self, node: fx.Node) -> None:
        new = self.graph.get_attr(str(node.target))
        new.meta |= dict(node.meta)
        self.values[node] = new

    def _op(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source = self.values[node.args[0]]  # type: ignore[index]
            index: Any = node.args[1]
            self.values[node] = (
                source[index] if isinstance(source, list) else self.emit(operator.getitem, source, index)
            )
            self._check(node)
            return
        strategies = tuple(placements.strategies[node] for placements in self.chosen)
        counter = itertools.count()

        def replace(leaf: fx.Node) -> fx.Node:
            position = next(counter)
            return self.convert(leaf, tuple(strategy.inputs[position] for strategy in strategies))

        args, kwargs = pytree.tree_map_only(fx.Node, replace, (node.args, dict(node.kwargs)))
        site = Site(
            node,
            tuple(args),
            kwargs,
            self,
            self.axes,
            self.coordinates,
            strategies,
            self.local_batch_norm,
            node in self.in_short,
            node in self.gradients,
            next((self.feeds[factor] for factor in node.all_input_nodes if factor in self.feeds), None),
        )
        self.values[node] = lower_node(site)
        self._check(node)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new local node with its fake value, described like the global node under way."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.fakes.of(target, args, kwargs)
        if self.current is not None:
            for key in ("phase", "module", "origin", "source", "again"):
                node.meta[key] = self.current.meta.get(key, "")
            node.meta["lowers"] = self.current.name
        if self.change is not None:
            node.meta["change"] = self.change
        return node

    def once(self, target: Any, *args: Any) -> fx.Node:
        """The same, made once in a stage for all who want it."""
        stage = (
            self.stages.of.get(self.current) if self.stages is not None and self.current is not None else None
        )
        key = (target, args, stage)
        if key not in self.shared:
            self.shared[key] = self.emit(target, *args)
        return self.shared[key]

    def offset(self, axis: str) -> fx.Node:
        """The placeholder of this rank's offset along an axis, in units."""
        return self.offsets[axis]

    def convert(self, node: fx.Node, want: tuple[Placement, ...]) -> fx.Node:
        """The local value of a global node under other placements; communication is inserted once and shared.

        What is gathered on an axis that cuts to save memory is gathered again in the backward, so that nobody keeps it
        in between.
        """
        value = self.values[node]
        assert isinstance(value, fx.Node), f"{node} has several outputs"
        have = tuple(placements.of(node) for placements in self.chosen)
        want = tuple(h if axis.size == 1 else w for h, w, axis in zip(have, want, self.axes, strict=True))
        if have == want:
            return value
        grows = any(
            isinstance(a, Shard) and a != b and axis.name != DATA
            for a, b, axis in zip(have, want, self.axes, strict=True)
        )
        phase = self.current.meta.get("phase", "") if grows and self.current is not None else ""
        stage = (
            self.stages.of.get(self.current) if self.stages is not None and self.current is not None else None
        )
        key = (node, want, phase, stage)
        if key not in self.converted:
            self.converted[key] = self._changed(node, value, have, want)
        return self.converted[key]

    def _changed(
        self, node: fx.Node, value: fx.Node, have: tuple[Placement, ...], want: tuple[Placement, ...]
    ) -> fx.Node:
        self.change = Change(tensor=node, user=self.current, have=have, want=want)
        conversion = Conversion(self, node.meta["val"].shape, self.axes, self.coordinates, have)
        changed = conversion.to(value, want)
        self.change = None
        return changed

    def local_shape(self, node: fx.Node, output: int = 0) -> list[int]:
        """The shape that a node's placement gives this rank."""
        value = node.meta["val"]
        tensor = value if isinstance(value, torch.Tensor) else value[output]
        return self._shape_under(tensor.shape, [p.outputs[node][output] for p in self.chosen])

    def _shape_under(self, full: Sequence[int], placements: Sequence[Placement]) -> list[int]:
        shape = [int(extent) for extent in full]
        for placement, axis, coordinate in zip(placements, self.axes, self.coordinates, strict=True):
            if isinstance(placement, Shard):
                shape[placement.dim] = axis.local(shape[placement.dim], coordinate)
        return shape

    def _check(self, node: fx.Node) -> None:
        value, local = node.meta["val"], self.values[node]
        pairs: list[tuple[int, Any]] = []
        if isinstance(value, torch.Tensor):
            assert isinstance(local, fx.Node)
            pairs = [(0, local.meta["val"])]
        elif isinstance(local, list):
            pairs = [(i, entry.meta["val"]) for i, entry in enumerate(local)]
        elif isinstance(value, (tuple, list)):
            pairs = list(enumerate(local.meta["val"]))
        for index, actual in pairs:
            if not isinstance(actual, torch.Tensor) or (
                not isinstance(value, torch.Tensor) and value[index] is None
            ):
                continue
            expected = self.local_shape(node, index)
            if list(actual.shape) != expected:
                raise ProgramError(
                    f"{node.name} ({node.target}) gives {list(actual.shape)} on this rank where its placement "
                    f"{[str(p.outputs[node][index]) for p in self.chosen]} demands {expected}."
                )

    def _finish(self) -> LocalGraph:
        nodes = self.source.nodes()
        total = self._output(nodes[self.source.total], "total")
        weight = self._output(nodes[self.source.weight], "weight")
        gradients = {
            name: self._output(nodes[node], f"gradient:{name}")
            for name, node in self.source.gradients.items()
        }
        buffers = {}
        whole: tuple[Placement, ...] = tuple(Replicate() for _ in self.axes)
        for name, node in self.source.new_buffers.items():
            self.current = nodes[node]
            buffers[name] = self.convert(nodes[node], whole)
        parts = self._parts() if self.stages is not None else {}
        summands = [node for by_stage in parts.values() for node in by_stage.values()]
        self.graph.output((total, weight, *gradients.values(), *buffers.values(), *summands))
        self.graph.eliminate_dead_code()
        placements = {name: self._end(f"gradient:{name}") for name in self.source.gradients}
        return LocalGraph(
            graph=self.graph,
            total=total.name,
            weight=weight.name,
            gradients={name: node.name for name, node in gradients.items()},
            new_buffers={name: node.name for name, node in buffers.items()},
            total_placement=self._end("total"),
            weight_placement=self._end("weight"),
            gradient_placements=placements,
            parts={
                name: {stage: node.name for stage, node in found.items()} for name, found in parts.items()
            },
            offsets={node.name: axis for axis, node in self.offsets.items()},
        )

    def _parts(self) -> dict[str, dict[int, fx.Node]]:
        """Each stage's part of every gradient."""
        assert self.stages is not None
        found: dict[str, dict[int, fx.Node]] = {}
        for name, by_stage in self.stages.gradients.items():
            for stage, summands in by_stage.items():
                values = [self._output(node, f"gradient:{name}") for node in summands]
                total = values[0]
                for value in values[1:]:
                    total = self.emit(torch.ops.aten.add.Tensor, total, value)
                found.setdefault(name, {})[stage] = total
        return found

    def _end(self, name: str) -> tuple[Placement, ...]:
        return tuple(ends[name] for ends in self.ends)

    def _output(self, node: fx.Node, name: str) -> fx.Node:
        """The node as it leaves the graph. What is whole here but a sum in `like` is given a fraction on every rank."""
        self.current = node
        have = [placements.of(node) for placements in self.chosen]
        want = self._end(name)
        reached = tuple(
            w if h == w or not isinstance(w, Partial) else Replicate()
            for h, w in zip(have, want, strict=True)
        )
        value = self.convert(node, reached)
        for axis, coordinate, now, wanted in zip(self.axes, self.coordinates, reached, want, strict=True):
            if now != wanted and axis.size > 1:
                value = self.emit(weighted_share, value, axis.units[coordinate] / axis.total)
        return value
