"""What the entries of a listing are called, and how those that are alike become one."""

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from plait.graph.graph import Graph
from plait.program.place.op_keys import exact_keys, find_blocks, fold_path, op_keys
from plait.program.show.listing import Fallback, HeldParameter, PlacedOp, Transfer


class Names:
    """What the nodes of a graph are called, with and without the numbers of blocks."""

    def __init__(self, graph: Graph) -> None:
        self.blocks = find_blocks(graph)
        self.exact, self.folded = exact_keys(graph), op_keys(graph)
        self.nodes = graph.nodes()
        self.inputs = {entry.node: entry.name for entry in graph.inputs}

    def __call__(self, node: fx.Node) -> str:
        if node.op == "call_function" and node.target is operator.getitem:
            source: Any = node.args[0]
            return f"{self(source)} [{node.args[1]}]"
        if node.op == "call_function":
            return self.folded[node]
        return fold_path(self.inputs.get(node.name, node.name), self.blocks)

    def module(self, node: fx.Node) -> str:
        """The path of the module that a node belongs to."""
        return fold_path(node.meta.get("module", ""), self.blocks)


Row = TypeVar("Row", HeldParameter, PlacedOp, Transfer, Fallback)


def folded(rows: Iterator[Row]) -> tuple[Row, ...]:
    """Rows that are equal but for their count, as one."""
    found: dict[Any, Row] = {}
    for row in rows:
        key = replace(row, count=0)
        known = found.get(key)
        found[key] = row if known is None else replace(known, count=known.count + row.count)
    return tuple(found.values())
