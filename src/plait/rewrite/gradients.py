"""Gradients of one convolution, computed by one op.

In: a graph in which each is an op of its own. Out: the same with one op for those of the same convolution, as torch
computes them.
"""

import operator
from typing import Any

import torch
from torch import fx

from plait.rewrite.values import Values

aten = torch.ops.aten


def join_gradients(graph: fx.Graph, values: Values) -> dict[fx.Node, fx.Node]:
    """Put the gradients of each convolution together: of its image, its kernel and its bias.

    Gives the nodes that took the place of others.
    """
    instead: dict[fx.Node, fx.Node] = {}
    found: dict[str, list[Any]] = {}
    sums: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is aten.convolution_backward.default and not node.args[7] and node.args[9] == 1:
            found.setdefault(repr((node.args[:3], node.args[4:10])), []).append(node)
        elif node.target is aten.sum.dim_IntList and list(node.args[1]) == [0, 2, 3] and len(node.args) == 2:
            sums[node.args[0]] = node
    for nodes in found.values():
        last = nodes[-1]
        gradient, kernel = last.args[0], last.args[2]
        mask = [any(node.args[10][index] for node in nodes) for index in range(3)]
        bias = sums.get(gradient) if mask[1] else None
        sizes = None if bias is None else [kernel.meta["val"].shape[0]]
        mask[2] |= bias is not None
        if len(nodes) == 1 and bias is None:
            continue
        with graph.inserting_before(nodes[0]):
            args = (*last.args[:3], sizes, *last.args[4:10], mask)
            made = graph.call_function(aten.convolution_backward.default, args)
        made.meta = dict(nodes[0].meta)
        values.evaluate(made)
        for node in nodes:
            node.replace_all_uses_with(made)
            graph.erase_node(node)
        if bias is not None:
            with graph.inserting_after(made):
                part = graph.call_function(operator.getitem, (made, 2))
            part.meta = {**bias.meta, "val": made.meta["val"][2]}
            bias.replace_all_uses_with(part)
            graph.erase_node(bias)
            instead[bias] = part
            del sums[gradient]
    return instead
