"""What a node of a local graph is to the unit that it is in.

In: nodes. Out: who reads their memory, which of them are random zeros and ones.
"""

from collections.abc import Sequence

from torch import fx

from plait.graph.op_family import family
from plait.graph.storage import is_item, shows_input
from plait.program.cost.op_time import op_name


def elements_of(node: fx.Node) -> int:
    return int(node.meta["val"].numel())


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Who reads a node's memory, through views too."""
    found = []
    for user in node.users:
        if user.op == "call_function" and (shows_input(user) or is_item(user)):
            found += readers_of(user)
        else:
            found.append(user)
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
