"""What a node of a graph is computed from."""

from collections.abc import Callable, Iterable

from torch import fx


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
