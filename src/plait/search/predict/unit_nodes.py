"""What a node of a local graph is to the unit that it is in.

In: nodes. Out: whose memory they show, who reads them, which of them only gradients need.
"""

from collections.abc import Mapping, Sequence

from torch import fx

from plait.graph.op_family import family, is_view
from plait.program.cost.op_time import op_name
from plait.program.segment.recompute import is_backward, is_item


def elements_of(node: fx.Node) -> int:
    return int(node.meta["val"].numel())


def storage_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node shows."""
    while node.op == "call_function" and (is_view(node.target) or is_item(node)) and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if is_item(node) and not is_view(source.target):
            return node
        node = source
    return node


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Who reads a node's memory, through views too."""
    found = []
    for user in node.users:
        if user.op == "call_function" and (is_view(user.target) or is_item(user)):
            found += readers_of(user)
        else:
            found.append(user)
    return found


def only_for_gradients(nodes: Sequence[fx.Node], unit_of: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Backward ops on which nothing but gradients of their own unit's parameters depends."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        later = [user for user in node.users if user.op != "output"]
        if is_backward(node) and all(u in found and unit_of[u] == unit_of[node] for u in later):
            found.add(node)
    return found


def random_masks(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Random zeros and ones, scaled or not: one byte each is enough."""
    found: set[fx.Node] = set()
    for node in nodes:
        made = family(node.target) == "random"
        scaled = op_name(node.target) == "div" and node.all_input_nodes and node.all_input_nodes[0] in found
        if made or scaled:
            found.add(node)
    return found
