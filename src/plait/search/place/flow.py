"""A graph as tensors that pass between ops: what costs are counted on.

In: a graph, one mesh axis, and what was chosen on other axes. Out: for every op the tensors it reads, their bytes and
its FLOPs on one rank of the *other* axes, which tensors are kept for the backward, and what leaves the graph. It
chooses nothing.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from plait.graph.cost import node_flops
from plait.graph.graph import Graph
from plait.program.place.placement import AxisShares, Shard, Strategy
from plait.program.place.propagate import Placements
from plait.program.place.rules import Op
from plait.program.place.rules.base import aten, ours

Tensor = tuple[fx.Node, int]
"""The producer of a tensor and the number of its output."""

_VIEWS = {
    aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.detach, aten.alias,
    ours.beside,
}  # fmt: skip
"""Ops whose results are the memory of their argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Something that leaves the graph and must be placed in a certain way."""

    name: str
    """The parameter whose gradient it is; empty for what must be whole (a buffer's new value)."""
    tensor: Tensor
    phase: str


class Flow:
    """The tensors of one graph, seen along one axis."""

    def __init__(
        self,
        graph: Graph,
        axis: AxisShares,
        others: Sequence[Placements] = (),
        *,
        held: float = 2.0,
    ) -> None:
        """`held`: bytes that a rank holds for each byte of a trained parameter; 2: its gradient, no optimizer."""
        self.graph = graph
        self.axis = axis
        self.others = tuple(others)
        self.held = held

    @cached_property
    def ops(self) -> list[fx.Node]:
        """The computing nodes, in order."""
        return [node for node in self.graph.ops() if node.target is not operator.getitem]

    @cached_property
    def reads(self) -> dict[fx.Node, list[Tensor]]:
        """The tensors that each op reads, in the order of its strategies' inputs."""
        return {node: [tensor_of(entry) for entry in Op(node, self.axis).tensors] for node in self.ops}

    @cached_property
    def readers(self) -> dict[Tensor, list[tuple[fx.Node, int]]]:
        """Every (op, position) that reads a tensor."""
        found: dict[Tensor, list[tuple[fx.Node, int]]] = {}
        for node, tensors in self.reads.items():
            for position, tensor in enumerate(tensors):
                found.setdefault(tensor, []).append((node, position))
        return found

    @cached_property
    def parameters(self) -> dict[fx.Node, str]:
        """Placeholder -> name of the parameter, trainable or not."""
        nodes = self.graph.nodes()
        return {nodes[entry.node]: entry.name for entry in self.graph.inputs_of("parameter")}

    @cached_property
    def ends(self) -> list[End]:
        """Gradients and new buffers."""
        nodes = self.graph.nodes()
        leaving = [*self.graph.gradients.items(), *(("", node) for node in self.graph.new_buffers.values())]
        return [
            End(name=name, tensor=tensor_of(nodes[node]), phase=nodes[node].meta.get("phase", ""))
            for name, node in leaving
        ]

    @cached_property
    def kept(self) -> set[Tensor]:
        """What is made in the forward and read in the backward: of several views of one memory, the first."""
        found: dict[Tensor, Tensor] = {}
        for node in self.ops:
            for output in range(len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else 1):
                readers = self.readers.get((node, output), ())
                if node.meta["phase"] == "forward" and any(r.meta["phase"] == "backward" for r, _ in readers):
                    found.setdefault(self._owner((node, output)), (node, output))
        return {tensor for owner, tensor in found.items() if owner[0].op == "call_function"}

    def _owner(self, tensor: Tensor) -> Tensor:
        node = tensor[0]
        while node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _VIEWS:
            tensor = self.reads[node][0]
            node = tensor[0]
        return tensor

    def num_bytes(self, tensor: Tensor) -> float:
        """Bytes of a tensor on one rank of the other axes."""
        value = value_of(tensor)
        if value is None:
            return 0.0
        bytes_ = float(value.numel() * value.element_size())
        for placements in self.others:
            if isinstance(placements.outputs[tensor[0]][tensor[1]], Shard):
                bytes_ /= placements.axis.size
        return bytes_

    def held_bytes(self, node: fx.Node) -> float:
        """Bytes that a parameter takes with all that is kept for it, on one rank of the other axes."""
        return self.num_bytes((node, 0)) * (self.held if self.parameters[node] in self._trained else 1.0)

    @cached_property
    def _trained(self) -> set[str]:
        return {entry.name for entry in self.graph.inputs_of("parameter") if entry.trainable}

    def flops(self, node: fx.Node) -> float:
        """FLOPs of an op on one rank of the other axes."""
        flops = float(node_flops(node))
        for placements in self.others:
            if is_cut(placements.strategies[node]):
                flops /= placements.axis.size
        return flops

    def taken(self, node: fx.Node) -> list[tuple[AxisShares, Strategy]]:
        """How other axes run an op."""
        return [(placements.axis, placements.strategies[node]) for placements in self.others]


def tensor_of(node: fx.Node) -> Tensor:
    """What a node stands for: a getitem for one output of the op before it."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def value_of(tensor: Tensor) -> torch.Tensor | None:
    """The fake value of a tensor; None where the output is absent or no tensor."""
    value = tensor[0].meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[tensor[1]]
    return value if isinstance(value, torch.Tensor) else None


def is_cut(strategy: Strategy) -> bool:
    """Whether each rank does a part of the work."""
    return any(isinstance(p, Shard) for p in (*strategy.inputs, *strategy.outputs))
