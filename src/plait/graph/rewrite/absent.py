"""Gradients that only some batches have, such as those of a layer that a forward uses for long samples alone.

In: a graph, the parameters that graphs of other shapes train or leave. Out: the same graph with a gradient of each of
them, marked as absent where it has none (`graph/ops/choice.py`), so that all ranks exchange the same gradients in
every step.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from plait.graph.graph import Graph
from plait.graph.ops.choice import ABSENT
from plait.graph.rewrite.new_nodes import call

aten = torch.ops.aten


def with_absent(graph: Graph, names: Collection[str]) -> Graph:
    """Gradients of `names`, whether or not this graph reaches them; the given graph stays as it is."""
    held = {entry.name: entry.node for entry in graph.inputs_of("parameter")}
    wanted = [name for name in names if name in held]
    if not wanted:
        return graph
    copied: dict[fx.Node, fx.Node] = {}
    made = fx.Graph()
    output = made.graph_copy(graph.graph, copied)
    for old, new in copied.items():
        new.meta = dict(old.meta)
    nodes = {old.name: new for old, new in copied.items()}
    assert all(name == new.name for name, new in nodes.items()), "names are kept in a copy"
    gradients = dict(graph.gradients)
    for name in wanted:
        if name in graph.gradients:
            like = nodes[graph.gradients[name]]
            node = call(made, torch.ops.plait.present.default, (like,), like)
        else:
            like = nodes[held[name]]
            node = call(made, aten.full_like.default, (like, ABSENT), like)
            node.meta |= {"phase": "backward"}
        node.meta |= {"origin": node.name, "source": like.meta.get("source", "")}
        gradients[name] = node.name
    named = {node.name: node for node in made.nodes}
    left = [named[node] for name, node in gradients.items() if name not in graph.gradients]
    made.output((*_flat(output), *left))
    return replace(
        graph,
        graph=made,
        gradients=gradients,
        conditional=graph.conditional.union(wanted),
        unused=tuple(name for name in graph.unused if name not in gradients),
        known={},
    )


def _flat(output: object) -> tuple[fx.Node, ...]:
    assert isinstance(output, tuple)
    return tuple(node for node in output if isinstance(node, fx.Node))
