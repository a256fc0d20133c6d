"""What a node of a graph is computed from, and what is left of it when nobody reads it."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx


def arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments in flattened order, repeats included."""
    found: list[fx.Node] = []
    _gather(node.args, found)
    _gather(node.kwargs, found)
    return found


def _gather(value: Any, found: list[fx.Node]) -> None:
    if isinstance(value, fx.Node):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            _gather(entry, found)
    elif isinstance(value, dict):
        for entry in value.values():
            _gather(entry, found)


def ancestors(nodes: Iterable[fx.Node], within: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """The nodes and all that they are computed from; with `within`, not beyond nodes for which it does not hold."""
    found: set[fx.Node] = set()
    todo = [node for node in nodes if within(node)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [source for source in node.all_input_nodes if within(source)]
    return found


def drop_unread(node: Any) -> None:
    """Erase an op that nobody reads any more, and what its first argument was made of for it alone."""
    while isinstance(node, fx.Node) and node.op == "call_function" and not node.users:
        before = node.args[0]
        node.graph.erase_node(node)
        node = before
