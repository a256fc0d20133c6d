"""Repeated blocks folded: ops that are alike in all blocks are one thing to choose for.

In: the flow of a graph. Out: classes of nodes. Two nodes share a class only if their key (`op_keys`), their shapes,
their constant arguments and the way other axes cut them agree.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait.program.place.op_keys import exact_keys, find_blocks, fold_path, op_keys
from plait.search.place.flow import Flow, value_of
from plait.torch_private import pytree


@dataclass(frozen=True, kw_only=True, slots=True)
class OpClass:
    """Nodes that are run, or held, in one way."""

    key: str
    """The key of its ops, the folded name of a parameter, or the name of another input."""
    nodes: tuple[fx.Node, ...]
    """In order."""

    @property
    def first(self) -> fx.Node:
        """One of them, to look at."""
        return self.nodes[0]


def fold(flow: Flow, given: Mapping[fx.Node, Any], *, blocks: bool = True) -> list[OpClass]:
    """The classes of a graph's inputs and ops, in order of their first node; `blocks=False` keeps each node apart.

    Nodes for which something is `given` share a class only with those for which the same is.
    """
    keys = op_keys(flow.graph) if blocks else exact_keys(flow.graph)
    repeated = find_blocks(flow.graph) if blocks else frozenset()
    found: dict[Hashable, list[fx.Node]] = {}
    names: dict[Hashable, str] = {}
    for node in flow.graph.graph.nodes:
        if node in flow.parameters:
            key = fold_path(flow.parameters[node], repeated)
            identity: Hashable = ("parameter", key, _describe([node.meta["val"]]))
        elif node in keys:
            key = keys[node]
            identity = (key, _constants(node), _shapes(flow, node))
        elif node.op in ("placeholder", "get_attr"):
            key = node.name
            identity = (node.op, node.name)
        else:
            continue
        identity = (identity, str(given.get(node, "")))
        found.setdefault(identity, []).append(node)
        names[identity] = key
    return [OpClass(key=names[identity], nodes=tuple(nodes)) for identity, nodes in found.items()]


def _constants(node: fx.Node) -> str:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return repr(["*" if isinstance(leaf, fx.Node) else leaf for leaf in leaves])


def _shapes(flow: Flow, node: fx.Node) -> Hashable:
    values = [value_of(tensor) for tensor in flow.reads[node]]
    elsewhere = tuple(str(strategy) for _, strategy in flow.taken(node))
    return (_describe(values), _describe([node.meta["val"]]), elsewhere)


def _describe(values: Sequence[Any]) -> Hashable:
    leaves = pytree.tree_leaves(values)
    return tuple(
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
