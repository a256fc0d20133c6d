"""Nodes that are written into a traced graph, beside those that they are like.

In: a graph, a node whose marks are taken over. Out: a new node with its fake value.
"""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def constant(graph: fx.Graph, like: fx.Node, value: float) -> fx.Node:
    val = like.meta["val"]
    node = graph.call_function(
        aten.full.default, ([], value), {"dtype": val.dtype, "device": torch.device("cpu")}
    )
    adopt(node, like, val.new_empty((), dtype=val.dtype))
    return node


def as_scalar(graph: fx.Graph, weight: fx.Node, total: fx.Node) -> fx.Node:
    """The weight as a 0-dim tensor of the total's dtype."""
    val, dtype = weight.meta["val"], total.meta["val"].dtype
    if val.dtype != dtype:
        weight = call(graph, aten._to_copy.default, (weight,), weight, dtype=dtype)
    if val.ndim != 0:
        weight = call(graph, aten.view.default, (weight, []), weight)
    return weight


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
    """A new node with its fake value computed and the rest of the meta taken from `like`."""
    node = graph.call_function(target, args, kwargs)
    fake_args = torch.fx.map_arg(args, lambda n: n.meta["val"])
    with torch.no_grad(), like_mode(like):
        value = target(*fake_args, **kwargs)
    adopt(node, like, value)
    return node


def like_mode(node: fx.Node) -> Any:
    """The fake mode of a node's value."""
    value = node.meta["val"]
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value.fake_mode


def adopt(node: fx.Node, like: fx.Node, value: Any) -> None:
    kept = ("phase", "module", "grad", "source", "number", "owner")
    node.meta = {key: like.meta[key] for key in kept if key in like.meta}
    node.meta["val"] = value
