"""How long captured graphs take on this processor, run as they are, one after the other.

In: graphs with equal inputs. Out: seconds of each: the least of several runs, in turns. Values are random where they
are numbers, zero where they are indices; nothing is trained.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from plait.graph.graph import Graph
from plait.program.segment.codegen import make_segment

_RUNS = 10
"""Of each graph."""


def time_graphs(graphs: Sequence[Graph]) -> list[float | None]:
    """Seconds of each graph; None where it cannot be run on such values."""
    names = [entry.node for entry in graphs[0].inputs]
    nodes = graphs[0].nodes()
    values = [_like(nodes[name].meta["val"]) for name in names]
    runs = []
    for graph in graphs:
        output = next(node for node in graph.graph.nodes if node.op == "output")
        ends = list(dict.fromkeys(node.name for node in output.all_input_nodes))
        if any(node.op == "get_attr" for node in graph.graph.nodes):
            return [None] * len(graphs)
        segment = make_segment("whole", "forward", list(graph.ops()), names, ends, torch.device("cpu"))
        runs.append(segment.run)
    best = [float("inf")] * len(runs)
    with torch.no_grad():
        for _ in range(_RUNS):
            for index, run in enumerate(runs):
                began = time.perf_counter()
                try:
                    run(list(values))
                except (RuntimeError, IndexError):
                    return [None] * len(graphs)
                best[index] = min(best[index], time.perf_counter() - began)
    return list(best)


def _like(value: Any) -> torch.Tensor:
    if value.dtype.is_floating_point:
        return torch.rand(value.shape, dtype=value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)
