"""Write the graph that one rank runs: local shapes, and communication where placements change.

In: a global graph, the placements chosen on each axis, and the rank's coordinates. Out: a `LocalGraph` whose nodes have
local fake values, with `communicate` nodes where ranks exchange data. Every node's local shape is checked against the
one that its placement demands, so a wrong rule is found here and not by a wrong gradient.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from plait.errors import ProgramError
from plait.graph.graph import Graph
from plait.graph.loss import like_mode
from plait.program.communicate import all_gather, all_reduce, local_piece, merge_dims, split_dim
from plait.program.local_functions import weighted_share
from plait.program.lowering import Local, Site, lower_node
from plait.program.lowerings import REGISTERED as _REGISTERED  # noqa: F401
from plait.program.placement import Partial, Placement, Replicate, Shard
from plait.program.propagate import Placements


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalGraph:
    """What one rank computes in one micro-step."""

    graph: fx.Graph
    """Ops on local pieces, with communication as nodes."""
    total: str
    """Local node of the loss's numerator."""
    weight: str
    """Local node of its denominator."""
    gradients: dict[str, str]
    """Parameter name -> local node."""
    new_buffers: dict[str, str]
    """Buffer name -> local node, equal on all ranks."""
    total_placement: tuple[Placement, ...]
    """Per axis: replicated, or a partial sum."""
    weight_placement: tuple[Placement, ...]
    """Likewise."""
    gradient_placements: dict[str, tuple[Placement, ...]]
    """Likewise, by parameter name."""


def localize(
    graph: Graph,
    chosen: Sequence[Placements],
    coordinates: Sequence[int],
    *,
    local_batch_norm: bool,
    like: Sequence[tuple[Graph, Placements]] | None = None,
) -> LocalGraph:
    """The local graph of the rank at `coordinates`.

    Its total, weight and gradients leave as they do in `like` (per axis, another micro-batch of the step with its
    graph), to which they will be added; on their own, as they come.
    """
    ends = [_ends(graph, placements) for placements in chosen]
    if like is not None:
        ends = [_ends(other, placements) for other, placements in like]
    return _Localizer(graph, tuple(chosen), tuple(coordinates), local_batch_norm, ends).build()


def _ends(graph: Graph, placements: Placements) -> dict[str, Placement]:
    """How what leaves a graph is placed: partial sums stay, everything else is whole."""
    nodes = graph.nodes()
    leaving = {"total": graph.total, "weight": graph.weight} | {
        f"gradient:{k}": v for k, v in graph.gradients.items()
    }
    return {
        name: Partial() if isinstance(placements.of(nodes[node]), Partial) else Replicate()
        for name, node in leaving.items()
    }


class _Localizer:
    def __init__(
        self,
        graph: Graph,
        chosen: tuple[Placements, ...],
        coordinates: tuple[int, ...],
        local_batch_norm: bool,
        ends: Sequence[dict[str, Placement]],
    ) -> None:
        self.source = graph
        self.ends = ends
        self.chosen = chosen
        self.axes = tuple(placements.axis for placements in chosen)
        self.coordinates = coordinates
        self.local_batch_norm = local_batch_norm
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Local] = {}
        self.converted: dict[tuple[fx.Node, tuple[Placement, ...]], fx.Node] = {}
        self.current: fx.Node | None = None
        self.mode = like_mode(next(iter(graph.graph.nodes)))
        self.offsets: dict[str, fx.Node] = {}

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
            if node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._op(node)
        return self._finish()

    def _placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        value = node.meta["val"]
        with self.mode:
            local_value = (
                value.new_empty(self.local_shape(node)) if isinstance(value, torch.Tensor) else value
            )
        new.meta |= {"val": local_value, "phase": "forward", "module": "", "origin": ""}
        self.values[node] = new

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
        counter = iter(range(len(pytree.tree_leaves((node.args, node.kwargs)))))

        def replace(leaf: fx.Node) -> fx.Node:
            position = next(counter)
            return self.convert(leaf, tuple(strategy.inputs[position] for strategy in strategies))

        args, kwargs = _map_nodes((node.args, dict(node.kwargs)), replace)
        site = Site(
            node, tuple(args), kwargs, self, self.axes, self.coordinates, strategies, self.local_batch_norm
        )
        self.values[node] = lower_node(site)
        self._check(node)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new local node with its fake value, described like the global node under way."""
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        if self.current is not None:
            for key in ("phase", "module", "origin", "source"):
                node.meta[key] = self.current.meta.get(key, "")
        return node

    def offset(self, axis: str) -> fx.Node:
        """The placeholder of this rank's offset along an axis, in units."""
        return self.offsets[axis]

    def convert(self, node: fx.Node, want: tuple[Placement, ...]) -> fx.Node:
        """The local value of a global node under other placements; communication is inserted once and shared."""
        value = self.values[node]
        assert isinstance(value, fx.Node), f"{node} has several outputs"
        have = tuple(placements.of(node) for placements in self.chosen)
        if have == want:
            return value
        if (node, want) not in self.converted:
            for index, (old, new) in enumerate(zip(have, want, strict=True)):
                value = self._convert_axis(value, index, old, new)
            self.converted[(node, want)] = value
        return self.converted[(node, want)]

    def _convert_axis(self, value: fx.Node, index: int, have: Placement, want: Placement) -> fx.Node:
        axis = self.axes[index]
        if have == want or axis.size == 1:
            return value
        if isinstance(want, Partial):
            assert isinstance(have, Replicate), f"{have} cannot become a partial sum"
            return self.emit(weighted_share, value, 1.0 / axis.size)
        if isinstance(have, Partial):
            value = self.emit(all_reduce, value, axis.name)
        elif isinstance(have, Shard):
            value = self._gather(value, index, have)
        if isinstance(want, Shard):
            value = self._take_piece(value, index, want)
        return value

    def _gather(self, value: fx.Node, index: int, have: Shard) -> fx.Node:
        axis = self.axes[index]
        per_unit = self._per_unit(value, have, index)
        extents = [units * per_unit for units in axis.units]
        if have.outer == 1:
            return self.emit(all_gather, value, axis.name, have.dim, extents)
        parts = self.emit(split_dim, value, have.dim, have.outer)
        return self.emit(merge_dims, self.emit(all_gather, parts, axis.name, have.dim + 1, extents), have.dim)

    def _take_piece(self, value: fx.Node, index: int, want: Shard) -> fx.Node:
        axis, coordinate = self.axes[index], self.coordinates[index]
        extent = value.meta["val"].shape[want.dim] // want.outer
        piece = (axis.local(extent, coordinate), extent // axis.total, self.offsets[axis.name])
        if want.outer == 1:
            return self.emit(local_piece, value, want.dim, *piece)
        parts = self.emit(split_dim, value, want.dim, want.outer)
        return self.emit(merge_dims, self.emit(local_piece, parts, want.dim + 1, *piece), want.dim)

    def _per_unit(self, value: fx.Node, have: Shard, index: int) -> int:
        """Extent of one unit, also where this rank has none: taken from the global node."""
        axis, coordinate = self.axes[index], self.coordinates[index]
        own = axis.units[coordinate]
        if own:
            return int(value.meta["val"].shape[have.dim]) // own // have.outer
        for node, local in self.values.items():
            if local is value:
                return int(node.meta["val"].shape[have.dim]) // axis.total // have.outer
        raise ProgramError(f"no global counterpart of {value.name}.")

    def local_shape(self, node: fx.Node, output: int = 0) -> list[int]:
        """The shape that a node's placement gives this rank."""
        value = node.meta["val"]
        tensor = value if isinstance(value, torch.Tensor) else value[output]
        shape = [int(extent) for extent in tensor.shape]
        for placements, axis, coordinate in zip(self.chosen, self.axes, self.coordinates, strict=True):
            placement = placements.outputs[node][output]
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
            if list(actual.shape) != expected and not _is_opaque(node):
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
        for name, node in self.source.new_buffers.items():
            self.current = nodes[node]
            whole: tuple[Placement, ...] = tuple(Replicate() for _ in self.axes)
            buffers[name] = self.convert(nodes[node], whole)
        self.graph.output((total, weight, *gradients.values(), *buffers.values()))
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
        )

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


def _is_opaque(node: fx.Node) -> bool:
    """Ops whose secondary outputs have shapes of their own (the log-sum-exp of attention kernels)."""
    return "attention" in str(node.target)


def _map_nodes(value: Any, replace: Any) -> Any:
    """Replace nodes in nested arguments, in the order of `pytree` leaves."""
    leaves, spec = pytree.tree_flatten(value)
    return pytree.tree_unflatten(
        [replace(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec
    )
