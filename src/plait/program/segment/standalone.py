"""A segment as a graph of its own, as Inductor takes it.

In: a segment, which of its outputs are written to memory that is given, the numbers that it takes. Out: a graph that
takes its tensors, then that memory. Numbers are written into it. Gradients of products that nobody else reads are left
in float32 by the product itself.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from plait.graph.ops import batch_norm, scaled
from plait.graph.ops.product_into import PRODUCT_INTO, WIDE_PRODUCT
from plait.program.program import Segment
from plait.program.segment.codegen import Fill

DECOMPOSITIONS = {**batch_norm.DECOMPOSITIONS, **scaled.IMPLEMENTATIONS}
"""Ops of our own that Inductor may look into."""


def graph_of(
    segment: Segment,
    filled: Sequence[tuple[fx.Node, Fill]],
    device: torch.device,
    numbers: Mapping[str, int] = MappingProxyType({}),
) -> fx.GraphModule:
    """The segment alone, on `device`; outputs that are written to given memory are inputs at the end instead.

    `numbers`: what inputs are that are no tensors.
    """
    graph = fx.Graph()
    copies: dict[str, Any] = dict(numbers)
    for name in segment.inputs:
        if name not in numbers:
            copies[name] = graph.placeholder(name)
    memory = {node: graph.placeholder(f"{fill.output}_into") for node, fill in filled}
    skipped = {fill.output for _, fill in filled}
    by_fill = dict(filled)
    dropped = _between(by_fill)
    wide = find_wide(segment, by_fill) if device.type == "cuda" else {}
    widened = set(wide.values())
    for node in segment.nodes:
        if node in by_fill:
            into: Any = memory[node]
            if by_fill[node].shape is not None:
                into = graph.call_function(
                    torch.ops.aten.view.default, (into, list(by_fill[node].shape or ()))
                )
            if by_fill[node].transposed:
                into = graph.call_function(torch.ops.aten.t.default, (into,))
            operands = [copies[arg.name] for arg in node.args if isinstance(arg, fx.Node)]
            graph.call_function(PRODUCT_INTO, (*operands, into))
        elif node in widened:
            copies[node.name] = copies[node.all_input_nodes[0].name]
        elif node in wide:
            factors = [copies[arg.name] for arg in node.args if isinstance(arg, fx.Node)]
            copies[node.name] = graph.call_function(WIDE_PRODUCT, tuple(factors))
        elif node not in dropped:
            copies[node.name] = copied = graph.node_copy(node, lambda entry: copies[entry.name])
            if isinstance(copied.kwargs.get("device"), torch.device):
                copied.kwargs = {**copied.kwargs, "device": device}
    graph.output(tuple(copies[name] for name in segment.outputs if name not in skipped))
    return fx.GraphModule(torch.nn.Module(), graph)


def find_wide(segment: Segment, filled: Mapping[fx.Node, Fill]) -> dict[fx.Node, fx.Node]:
    """Products in 16 bits that are, maybe through views, gradients in float32 and nothing else; the cast of each."""
    found = {}
    inside = set(segment.nodes)
    for cast in segment.nodes:
        if cast.target is not torch.ops.aten._to_copy.default or cast.meta["val"].dtype != torch.float32:
            continue
        if any(user.op != "output" for user in cast.users):  # else the cast is fused with what reads it
            continue
        source = cast.args[0]
        while isinstance(source, fx.Node) and source in inside and len(source.users) == 1:
            if source.target is torch.ops.aten.mm.default and source not in filled:
                if source.meta["val"].dtype == torch.bfloat16 and source.name not in segment.outputs:
                    found[source] = cast
                break
            if source.target not in _VIEWS or source.name in segment.outputs:
                break
            source = source.args[0]
    return found


_VIEWS = (torch.ops.aten.t.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _between(filled: Mapping[fx.Node, Fill]) -> set[fx.Node]:
    """Views that lead from a filled product to its output."""
    found: set[fx.Node] = set()
    for node, fill in filled.items():
        current = node
        while current.name != fill.output:
            current = next(iter(current.users))
            found.add(current)
    return found
