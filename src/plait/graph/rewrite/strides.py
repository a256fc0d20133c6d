"""Ops whose meaning hangs on how a tensor lies in memory: they get it as it lay when the step was traced.

In: a functional graph. Out: the same, changed in place. Solvers factorize a matrix or its transpose, whichever lies
better, and the backward was traced for one of them; `as_strided` reads memory. What a plan cuts, gathers or sends
comes out contiguous, whatever it was.
"""

from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.rewrite.new_nodes import call
from plait.torch_private.ops import OpOverload, schema_of

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
            elif target in _OF_MEMORY:
                _begin_with_its_own(graph, node)


def _begin_with_its_own(graph: fx.Graph, node: fx.Node) -> None:
    """Count from where a tensor begins: what is sent, gathered or cut lies somewhere in the memory of others."""
    at = 3 if node.target is aten.as_strided.default else 4
    offset: Any = node.args[at] if len(node.args) > at else None
    if node.target is aten.as_strided.default:
        offset = _from_the_whole(node, offset)
    source: Any = node.args[0]
    if offset == source.meta["val"].storage_offset():  # the default: where the tensor itself begins
        node.args = node.args[:at]
    elif offset is not None and not _shows_a_part(source.meta["val"]):
        with graph.inserting_before(node):
            kept = torch.contiguous_format
            node.update_arg(0, call(graph, aten.clone.default, (source,), node, memory_format=kept))


def _from_the_whole(node: fx.Node, offset: Any) -> Any:
    """Read what shows all of the memory, where a view of it was read; returns where it begins in that."""
    source: Any = node.args[0]
    begin = source.meta["val"].storage_offset() if offset is None else offset
    root = source
    while _shows_a_part(root.meta["val"]) and _is_view(root) and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    value: Tensor = root.meta["val"]
    if root is source or _shows_a_part(value) or not value.is_contiguous():
        return offset
    node.args = (root, *node.args[1:3], begin)
    return begin


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    first = schema_of(node.target).arguments[:1]
    return any(entry.alias_info is not None and not entry.alias_info.is_write for entry in first)


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
