"""Ops whose meaning hangs on how a tensor lies in memory: they get it as it lay when the step was traced.

In: a functional graph. Out: the same, changed in place. Solvers factorize a matrix or its transpose, whichever lies
better, and the backward was traced for one of them; `as_strided` reads memory. What a plan cuts, gathers or sends
comes out contiguous, whatever it was.
"""

import torch
from torch import Tensor, fx

from plait.graph.rewrite.new_nodes import call

aten = torch.ops.aten
_SOLVERS = (aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default)
_OF_MEMORY = (aten.as_strided.default, aten.as_strided_scatter.default)


def pin_strides(graph: fx.Graph) -> None:
    """Have these ops read copies that lie as what they were traced with."""
    for target in (*_SOLVERS, *_OF_MEMORY):
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            value: Tensor = source.meta["val"]
            if target in _SOLVERS or not (value.is_contiguous() or _shows_a_part(value)):
                node.update_arg(0, _as_it_lay(graph, node, source))


def _shows_a_part(value: Tensor) -> bool:
    """Whether its memory holds more than it shows: a copy would not have the rest."""
    return value.numel() * value.element_size() != value.untyped_storage().nbytes()


def _as_it_lay(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    """A copy whose dims are in the order in memory in which those of `source` were."""
    value: Tensor = source.meta["val"]
    outer_first = sorted(range(value.ndim), key=value.stride().__getitem__, reverse=True)
    back = sorted(range(value.ndim), key=outer_first.__getitem__)
    with graph.inserting_before(node):
        laid = call(graph, aten.permute.default, (source, outer_first), node)
        copy = call(graph, aten.clone.default, (laid,), node, memory_format=torch.contiguous_format)
        return call(graph, aten.permute.default, (copy, back), node)
