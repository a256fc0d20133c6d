"""What depends on nothing is computed once: masks, positions and whatever the model makes of numbers alone.

In: a graph. Out: one in which such values are constants, kept with their nodes, and how many they are. What the step
gives back stays: its reader may write into it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from plait.graph.cost import value_bytes
from plait.graph.graph import Graph
from plait.torch_private.ops import OpOverload, schema_of

CONSTANT = "what depends on nothing is computed once"
"""As people are told of it."""
_MOST_BYTES = 16 * 2**20
"""That a constant may take: it stays for the whole run."""


def with_constants(graph: Graph) -> tuple[Graph, int]:
    """The graph with what depends on nothing as constants, and their number."""
    known = _depending_on_nothing(graph)
    folded = {node for node in known if _pays(node, known)}
    if not folded:
        return graph, 0
    values: dict[fx.Node, Any] = {}
    new, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node in known:
            values[node] = _value(node, values)
        if node in folded:
            made = new.create_node("get_attr", f"once_{node.name}", name=node.name)
            made.meta = {**node.meta, "phase": "forward", "constant": values[node]}
        else:
            made = new.node_copy(node, nodes.__getitem__)
        nodes[node] = made
    new.eliminate_dead_code()
    return replace(graph, graph=new, known={}), len(folded)


def _depending_on_nothing(graph: Graph) -> set[fx.Node]:
    """Nodes that are computed of constants alone, the same in every step."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        pure = node.op == "get_attr" or (
            isinstance(node.target, OpOverload)
            and node.target.namespace == "aten"
            and torch.Tag.nondeterministic_seeded not in node.target.tags
            and not schema_of(node.target).is_mutable
            and isinstance(node.meta.get("val"), Tensor)
            and value_bytes(node.meta["val"]) <= _MOST_BYTES
        )
        if pure and all(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _pays(node: fx.Node, known: set[fx.Node]) -> bool:
    """Whether something reads a value that more than one op makes; a tensor of one number is as soon made anew."""
    if node.op == "get_attr" or not node.all_input_nodes:
        return False
    readers = [user for user in node.users if user not in known]
    return bool(readers) and all(user.op == "call_function" for user in readers)


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return node.meta["constant"]
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    return target(*args, **kwargs)
