"""The same program symbolic and imperative, lecture 003: d = b * a + 1 written down first, and line by line.

python -m examples.lectures.lecture003_symbolic_and_imperative
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from torch import Tensor, fx


def program(a: Tensor, b: Tensor) -> Tensor:
    """The lecture's program."""
    c = b * a
    return c + 1


def symbolic() -> fx.GraphModule:
    """Symbols first: the program runs once on stand-ins, and what it would do is written down."""
    return fx.symbolic_trace(program)


def seconds(call: Callable[[], object]) -> float:
    """Of one call, the median of 200."""
    found = []
    for _ in range(200):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def branches(a: Tensor, b: Tensor) -> Tensor:
    """What a graph cannot hold as it is: a branch on a value."""
    return program(a, b) if a.sum() > 0 else b


def exhibit() -> Exhibit:
    a, b = np.ones(10), np.ones(10) * 2
    by_numpy = b * a + 1
    graph = symbolic()
    given = (torch.from_numpy(a), torch.from_numpy(b))
    by_graph, by_line = graph(*given), program(*given)
    wide = (torch.ones(1_000_000), torch.ones(1_000_000) * 2)
    compiled = torch.compile(program)
    times = {
        "imperative, line by line": seconds(lambda: program(*wide)),
        "symbolic, as written": seconds(lambda: graph(*wide)),
        "symbolic, compiled: one pass over memory": seconds(lambda: compiled(*wide)),
    }
    try:
        fx.symbolic_trace(branches)
        told = "it is traced"
    except fx.proxy.TraceError as error:
        told = str(error)
    return Exhibit(
        lecture="003",
        title="Symbolic and imperative",
        idea="Imperative: every line is evaluated as Python comes to it; easy to write and to debug. "
        "Symbolic: the program is written down first and evaluated later, so it can be optimized as a "
        "whole. plait takes imperative programs and writes them down.",
        numbers=[
            Number(what="d[0] by numpy", lecture=3, ours=float(by_numpy[0])),
            Number(what="d[0], graph", ours=float(by_graph[0])),
            Number(what="largest difference of both ways", ours=float((by_graph - by_line).abs().max())),
            Number(
                what="compiled, to line by line, a million numbers",
                ours=times["symbolic, compiled: one pass over memory"] / times["imperative, line by line"],
            ),
        ],
        tables=[
            Table(
                title="d = b * a + 1 on a million numbers",
                columns=["how", "time"],
                rows=[[name, f"{1e3 * s:.2f} ms"] for name, s in times.items()],
            )
        ],
        texts={"The program, written down": str(graph.graph).strip(), "A branch on a value, traced": told},
        seen="Both give the same. Only the graph can be optimized: the product needs not be stored "
        "before 1 is added. What a branch on a value does to a captured training step, and what plait "
        "makes of it, is in [graphs](../graphs.md).",
    )


if __name__ == "__main__":
    show(exhibit())
