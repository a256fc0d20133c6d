"""What the nodes of local graphs stand for in a step: the values that instructions name, and what they are like.

In: the graphs of a step's micro-batches. Out: a `Value` for a node, with its `Spec` and `Storage`.
"""

from typing import Any

import torch

from plait.graph.graph import Graph
from plait.graph.storage import owner_of
from plait.program.cost.memory import storages_of
from plait.program.local.local_graph import LocalGraph
from plait.program.program import Spec, Storage
from plait.program.value import TANGENT, Value


class StepValues:
    """The values of one rank's step."""

    def __init__(self, *, own_tangents: bool) -> None:
        """`own_tangents`: every micro-batch is an update of its own."""
        self.specs: dict[Value, Spec] = {}
        self.constants: dict[Value, torch.Tensor] = {}
        self.storages: dict[Value, tuple[Storage, ...]] = {}
        self.offsets: dict[str, str] = {}
        """Placeholder -> the axis on which it says where the rank is."""
        self.shows: dict[Value, Value] = {}
        """Of a node that lies in the memory of a parameter: that parameter."""
        self._own_tangents = own_tangents
        self._given_to: dict[tuple[int, int], dict[str, Value]] = {}
        """Graph and micro-batch -> placeholder -> what comes in."""

    def tangent(self, number: int) -> Value:
        """The factor of a micro-batch's gradients: that of the step, or its own where it is an update of its own."""
        return Value.scalar("tangent", number) if self._own_tangents else TANGENT

    def of(self, graph: Graph, local: str, number: int) -> Value:
        """What a node of a local graph stands for in a micro-batch."""
        given = self._given_to.get((id(graph), number))
        if given is None:
            given = self._given_to[id(graph), number] = self._given(graph, number)
        found = given.get(local)
        return Value.node(local, number) if found is None else found

    def _given(self, graph: Graph, number: int) -> dict[str, Value]:
        found = {node: Value.offset(axis, number) for node, axis in self.offsets.items()}
        found |= {entry.node: Value.parameter(entry.name) for entry in graph.inputs_of("parameter")}
        found |= {entry.node: Value.buffer(entry.name) for entry in graph.inputs_of("buffer")}
        found |= {entry.node: Value.batch(i, number) for i, entry in enumerate(graph.inputs_of("batch"))}
        found |= {entry.node: Value.key(number) for entry in graph.inputs_of("key")}
        return found | {entry.node: self.tangent(number) for entry in graph.inputs_of("tangent")}

    def describe(self, graph: Graph, local: LocalGraph, number: int) -> None:
        """Note what a micro-batch makes: shapes, constants, and whose memory each value lies in."""
        self.offsets |= local.offsets
        rename = {node.name: self.of(graph, node.name, number) for node in local.graph.nodes}
        self.storages |= storages_of(local.graph.nodes, rename)
        gradients = set(local.gradients.values())
        inputs = {entry.node: entry.kind for entry in graph.inputs}
        for node in local.graph.nodes:
            value = node.meta.get("val")
            shown = rename[owner_of(node).name]
            if shown.kind == "parameter" and node.op == "call_function":
                self.shows[rename[node.name]] = shown
            if node.op == "get_attr":
                self.constants[rename[node.name]] = node.meta["constant"]
            if isinstance(value, torch.Tensor):
                kind: Any = "gradient" if node.name in gradients else "activation"
                if node.op == "placeholder":
                    given = inputs.get(node.name)
                    kind = given if given in ("parameter", "buffer") else "input"
                self.specs[rename[node.name]] = Spec(
                    kind=kind, shape=tuple(value.shape), dtype=value.dtype, strides=value.stride()
                )
