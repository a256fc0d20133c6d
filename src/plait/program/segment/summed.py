"""Gradients of a GELU, a layer norm or heads, and what follows from them at once, as one op for a compiler of GPUs.

In: a graph as `standalone.py` makes it. Out: the same in which such a gradient, the sums of its columns, and of a norm
the gradient that is added and the rounding, are `graph/ops/summed.py`'s. Found by dataflow; what does not fit is left
to the compiler.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.ops import summed
from plait.graph.ops.product_into import PRODUCT_INTO
from plait.graph.ops.summed import GELU_GRADIENT, HEADS_BESIDE, NORM_GRADIENT

aten = torch.ops.aten
_SHORT = (torch.bfloat16, torch.float16)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_HEADS = [1, 3, 0, 2, 4]
"""How [which, sample, head, place, entry] becomes [sample, place, which, head, entry]."""


def with_sums(graph: fx.Graph) -> None:
    """Rewrite in place what is found."""
    for node in list(graph.nodes):
        if node.target is aten.gelu_backward.default:
            _gelu(graph, node)
        elif node.target is aten.native_layer_norm_backward.default:
            _norm(graph, node)
        elif node.target is aten.clone.default:
            _heads(graph, node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target is PRODUCT_INTO)


def _gelu(graph: fx.Graph, node: fx.Node) -> None:
    given: Any = node.args
    (grad, x), like = given, node.meta["val"]
    sums = list(_sums(node, like.shape[-1]))
    fits = (
        node.kwargs.get("approximate", "none") == "none"
        and like.dtype in _SHORT
        and like.dim() > 1
        and like.shape[-1] >= summed.FEWEST_COLUMNS
        and all(_is_plain(entry, like.dtype) for entry in (node, grad, x))
    )
    if not fits or not sums:
        return
    with graph.inserting_before(node):
        made = graph.call_function(GELU_GRADIENT, tuple(_matrix(graph, entry) for entry in (grad, x)))
        gradient = graph.call_function(
            aten.reshape.default, (graph.call_function(operator.getitem, (made, 0)), list(like.shape))
        )
        found = graph.call_function(operator.getitem, (made, 1))
    gradient.meta["val"] = like
    for entry in sums:
        _put(graph, entry, found)
    node.replace_all_uses_with(gradient)


def _norm(graph: fx.Graph, node: fx.Node) -> None:
    given: Any = node.args
    grad, x, shape, mean, rstd, weight, _, asked = given
    items = {user.args[1]: user for user in node.users}
    dx = items.get(0)
    if dx is None or not asked[0] or len(shape) != 1:
        return
    if not summed.FEWEST_COLUMNS <= shape[0] <= summed.MOST_COLUMNS:
        return
    if not all(_is_plain(entry, torch.float32) for entry in (dx, grad, x, mean, rstd)):
        return
    total, added = _added(dx, node)
    rounded = [
        user for user in total.users if user.target is aten._to_copy.default and _is_plain(user, *_SHORT)
    ]
    dtype = total.meta["val"].dtype
    short = rounded[0] if rounded else None
    if short is not None and any(user.meta["val"].dtype != short.meta["val"].dtype for user in rounded):
        return
    last = total if short is None else short
    sums = list(_sums(last, shape[0])) if last.meta["val"].dtype in _SHORT else []
    if not (sums or rounded):
        return
    if set(total.users) == set(rounded):  # nobody reads more than 16 bits
        dtype = last.meta["val"].dtype
    with graph.inserting_before(node):
        taken = (
            _matrix(graph, _before_widening(grad)), _matrix(graph, _before_widening(x)),
            *(graph.call_function(aten.reshape.default, (entry, [-1])) for entry in (mean, rstd)),
            weight, None if added is None else _matrix(graph, added),
            dtype, last.meta["val"].dtype if rounded else dtype,
        )  # fmt: skip
        made = graph.call_function(NORM_GRADIENT, taken)
        parts = [graph.call_function(operator.getitem, (made, index)) for index in range(3)]
        whole = [
            graph.call_function(aten.reshape.default, (part, list(dx.meta["val"].shape)))
            for part in (parts[:2] if rounded and dtype != last.meta["val"].dtype else parts[:1] * 2)
        ]
        columns = [graph.call_function(aten.select.int, (parts[2], 0, index)) for index in range(3)]
    whole[0].meta["val"], whole[1].meta["val"] = total.meta["val"], last.meta["val"]
    for entry in sums:
        _put(graph, entry, columns[2])
    for entry in rounded:
        entry.replace_all_uses_with(whole[0 if dtype == last.meta["val"].dtype else 1])
    for index in (1, 2):
        if index in items:
            _put(graph, items[index], columns[index - 1])
    total.replace_all_uses_with(whole[0])


def _heads(graph: fx.Graph, node: fx.Node) -> None:
    """Gradients of queries, keys and values, which were one product, put beside one another again."""
    turned: Any = node.args[0]
    if turned.target is not aten.permute.default:
        return
    stacked, order = turned.args
    if stacked.target is not aten.stack.default or list(order) != _HEADS:
        return
    sources, like = list(stacked.args[0]), node.meta["val"]
    if len(stacked.args) > 1 or stacked.kwargs or like.dtype not in _SHORT or not like.is_contiguous():
        return
    sums = list(_sums(node, like.shape[2:].numel()))
    if not sums or like.shape[3:].numel() < summed.FEWEST_COLUMNS:
        return
    with graph.inserting_before(node):
        made = graph.call_function(HEADS_BESIDE, (sources,))
        beside = graph.call_function(
            aten.reshape.default, (graph.call_function(operator.getitem, (made, 0)), list(like.shape))
        )
        found = graph.call_function(operator.getitem, (made, 1))
    beside.meta["val"] = like
    for entry in sums:
        _put(graph, entry, found)
    node.replace_all_uses_with(beside)


def _added(dx: fx.Node, norm: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """What a norm's gradient becomes when the gradient beside it, which is there already, is added; and that one."""
    current, user = dx, None
    while len(current.users) == 1:
        user = next(iter(current.users))
        if user.target is not aten._to_copy.default or current is not dx or not _is_plain(user, *_SHORT):
            break
        current = user
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(current.users) != 1:
        return (current, None) if current is dx else (dx, None)
    first, second = user.args[:2]
    other = second if first is current else first
    fits = (
        isinstance(other, fx.Node)
        and other < norm
        and _is_plain(user, torch.float32, *_SHORT)
        and _is_plain(other, torch.float32, *_SHORT)
        and other.meta["val"].shape == user.meta["val"].shape == dx.meta["val"].shape
    )
    return (user, other) if fits and isinstance(other, fx.Node) else (dx, None)


def _sums(node: fx.Node, columns: int) -> Iterator[fx.Node]:
    """Sums of all but the last dim, of which there are so many columns, of a node or of views of it."""
    shape = node.meta["val"].shape
    rows = list(range(len(shape) - 1))
    for user in node.users:
        asked: Any = user.args[1:2]
        if user.target in _VIEWS and user.meta["val"].shape[-1] == columns:
            yield from _sums(user, columns)
        elif user.target is aten.sum.dim_IntList and not user.kwargs and rows and shape[-1] == columns:
            yield from [user] if sorted(dim % len(shape) for dim in asked[0]) == rows else []


def _put(graph: fx.Graph, node: fx.Node, columns: fx.Node) -> None:
    """Let a row of sums in float32 stand for `node`."""
    like = node.meta["val"]
    with graph.inserting_before(node):
        made = graph.call_function(aten.reshape.default, (columns, list(like.shape)))
        if like.dtype != torch.float32:
            made = graph.call_function(aten._to_copy.default, (made,), {"dtype": like.dtype})
    made.meta["val"] = like
    node.replace_all_uses_with(made)


def _matrix(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(aten.reshape.default, (node, [-1, node.meta["val"].shape[-1]]))


def _before_widening(node: fx.Node) -> fx.Node:
    """What a tensor in float32 was cast from, if from 16 bits: it is read as it is."""
    if node.target is aten._to_copy.default:
        given = node.all_input_nodes[0]
        if _is_plain(given, *_SHORT):
            return given
    return node


def _is_plain(value: Any, *dtypes: torch.dtype) -> bool:
    """Whether it is a tensor of these whose rows lie one after the other."""
    like = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(like, Tensor) and like.dtype in dtypes and like.is_contiguous()
