"""Batch norm layers that are called several times in a step: running statistics apart from what they normalize.

In: a functional graph. Out: the same, changed in place. Where the second call of a layer reads the statistics that the
first has made, each call makes its part of them from nothing, and sums make the new values. So no activation waits for
them, and stages of a pipeline may have a call each.
"""

import operator
from typing import Any

import torch
from torch import fx

from plait.graph.rewrite.new_nodes import adopt, call

aten = torch.ops.aten
_MEAN, _VARIANCE, _MOMENTUM = 3, 4, 5
"""Places among the arguments of `plait::batch_norm`; the first two also of what comes of them among its results."""


def part_shared_statistics(graph: fx.Graph) -> None:
    """Rewrite the calls whose statistics another call reads, and those calls."""
    calls: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.plait.batch_norm.default:
            calls.setdefault(_origin(node.args[_MEAN]), []).append(node)
    for shared in calls.values():
        for node in shared if len(shared) > 1 else ():
            _part(graph, node)


def _origin(node: Any) -> fx.Node:
    """What the statistics were before the step."""
    while node.op == "call_function":
        if node.target is aten.copy.default:
            node = node.args[1]
        elif node.target is operator.getitem and node.args[0].target is torch.ops.plait.batch_norm.default:
            node = node.args[0].args[node.args[1]]
        else:
            break
    return node  # type: ignore[no-any-return]


def _part(graph: fx.Graph, node: fx.Node) -> None:
    args = list(node.args)
    kept = 1 - args[_MOMENTUM]  # type: ignore[operator]
    for place in (_MEAN, _VARIANCE):
        before: Any = args[place]
        value = before.meta["val"]
        with graph.inserting_before(node):
            nothing = graph.call_function(
                aten.full.default,
                (list(value.shape), 0.0),
                {"dtype": value.dtype, "device": value.device},
            )
            adopt(nothing, node, value)
        args[place] = nothing
        for made in [user for user in node.users if user.args[1] == place]:
            with graph.inserting_after(made):
                scaled = call(graph, aten.mul.Tensor, (before, kept), made)
            with graph.inserting_after(scaled):
                new = call(graph, aten.add.Tensor, (scaled, made), made)
            made.replace_all_uses_with(new)
            new.args = (scaled, made)
    node.args = tuple(args)
