"""Whose memory a value of a graph lies in.

In: nodes with fake values, of a captured or a local graph. Out: the node that owns the memory, bytes. Views share the
memory of what they show; each part of a split lies in what was split; an op with several results owns one memory each.
"""

import operator
from collections.abc import Iterator

import torch
from torch import fx

from plait.graph.op_family import is_view


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one of several results of its input."""
    return node.target is operator.getitem


def shows_input(node: fx.Node) -> bool:
    """Whether a node's value lies in the memory of its first input: a view, or a part of one."""
    if is_item(node):
        made = node.args[0]
        return isinstance(made, fx.Node) and is_view(made.target)
    return is_view(node.target) and bool(node.all_input_nodes)


def users_through_views(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node, also through views of it; the views too."""
    for user in node.users:
        yield user
        if user.op == "call_function" and shows_input(user):
            yield from users_through_views(user)


def owner_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory in which a node's value lies: an op, one result of an op, or an input."""
    while node.op == "call_function" and shows_input(node):
        node = node.all_input_nodes[0]
    return node


def storage_bytes(value: torch.Tensor) -> int:
    """Bytes of the memory that a tensor lies in; more than its own where it shows a part."""
    return int(value.untyped_storage().nbytes()) if value.numel() else 0
