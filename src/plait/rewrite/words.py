"""Words of the language for what nodes of a graph compute.

In: a node. Out: a word and its numbers; `op` where the language has none. It looks at one node alone, and what it is
made of.
"""

import operator
from math import inf, isfinite
from typing import Any

import torch
from torch import fx

from plait.torch_private import pytree
from plait.torch_private.ops import OpOverload, base_name

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Ops that give another shape."""


def sources_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, each as often as it is there."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def word_of(node: fx.Node) -> tuple[str, tuple[Any, ...]]:
    """The word for what a node computes, and its numbers."""
    target, args, value = node.target, node.args, node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.kwargs or not isinstance(target, OpOverload):
        return "op", _signature(node)
    if target is aten.mm.default:
        return "mm", ()
    if target is aten.bmm.default:
        return "bmm", ()
    if target is aten.addmm.default and shape_of(args[0]) == (value.shape[1],):
        return "addmm", ()
    if target is aten.t.default and value.ndim == 2:
        return "t", ()
    if target in (aten.transpose.int, aten.permute.default):
        order = _order_of(node)
        return ("t", ()) if order == [1, 0] else ("perm", (",".join(map(str, order)),))
    if target is aten.add.Tensor and len(args) == 2 and _all_like(node):
        return "add", ()
    if target is aten.cat.default and (dim := _joined_dim(node)) is not None:
        return "cat", (dim,)
    if target in (aten.mul.Tensor, aten.div.Tensor) and (factor := _factor(node)) is not None:
        return "scale", (factor,)
    if target is aten.slice.Tensor and (bounds := _bounds(node)) is not None:
        return "slice", bounds
    if target in VIEWS:
        return "view", (",".join(map(str, value.shape)),)
    if target is aten.sum.dim_IntList and value.ndim == 2 and list(args[1]) == [0] and args[2:] == (True,):  # type: ignore[arg-type]
        return "rowsum", ()
    if target is aten.convolution.default and (settings := _plain_convolution(node)) is not None:
        return ("conv" if args[2] is None else "convb"), settings
    return _elementwise(node) or ("op", _signature(node))


def gradient_of(node: fx.Node) -> tuple[str, tuple[Any, ...], list[fx.Node]] | None:
    """The word for one of the gradients of a convolution, its numbers and what it is made of."""
    if node.target is not operator.getitem:
        return None
    source: Any = node.args[0]
    if source.target is not aten.convolution_backward.default:
        return None
    gradient, image, kernel, _, stride, padding, dilation, transposed, _, groups, _ = source.args
    if transposed or groups != 1 or gradient.meta["val"].ndim != 4:
        return None
    if node.args[1] == 2:
        return "convs", (), [gradient]
    return ("convx", "convw")[node.args[1]], _settings(stride, padding, dilation), [gradient, image, kernel]  # type: ignore[index]


def _settings(stride: Any, padding: Any, dilation: Any) -> tuple[Any, ...]:
    return ",".join(map(str, stride)), *map(int, padding), ",".join(map(str, dilation))


def _joined_dim(node: fx.Node) -> int | None:
    """The dim along which tensors of one kind are joined; None: there is one alone, or they differ in kind."""
    value, given = node.meta["val"], [source.meta["val"] for source in sources_of(node)]
    alike = all(tensor.ndim == value.ndim and tensor.dtype == value.dtype for tensor in given)
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return int(dim) % value.ndim if len(given) > 1 and alike else None


def _factor(node: fx.Node) -> float | None:
    """The number that a tensor is multiplied with; None: it is another tensor, or changes what kind it is."""
    source, factor = node.args
    same = isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype
    if not same or isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return None
    if node.target is aten.div.Tensor:
        factor = 1 / factor if factor else inf
    return float(factor) if node.meta["val"].is_floating_point() and isfinite(factor) else None


def _plain_convolution(node: fx.Node) -> tuple[Any, ...] | None:
    """Stride, padding and dilation of a convolution of images without groups; None: it is another one."""
    _, _, _, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or groups != 1 or node.meta["val"].ndim != 4:
        return None
    return _settings(stride, padding, dilation)


def _elementwise(node: fx.Node) -> tuple[str, tuple[Any, ...]] | None:
    """The word for a function of one or two tensors, element by element."""
    target, value = node.target, node.meta["val"]
    tensors = [arg for arg in node.args if isinstance(arg, fx.Node)]
    rest = node.args[len(tensors) :]
    if not isinstance(target, OpOverload) or target.namespace != "aten" or len(tensors) not in (1, 2):
        return None
    if torch.Tag.pointwise not in target.tags and target is not aten.threshold_backward.default:
        return None
    alike = all(shape_of(t) == tuple(value.shape) and t.meta["val"].dtype == value.dtype for t in tensors)
    if not alike or any(isinstance(arg, bool) or not isinstance(arg, (int, float)) for arg in rest):
        return None
    name = f"{base_name(target)}.{_overload(target)}"
    return f"map{len(tensors)}", (" ".join([name, *map(repr, rest)]),)


def _overload(target: Any) -> str:
    return str(target).rpartition(".")[2]


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """What tells an op from others of the same inputs; of ops that are not torch's own, each is one of a kind."""
    pure = node.target is operator.getitem or (
        isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    )
    shown = pytree.tree_map(lambda leaf: "." if isinstance(leaf, fx.Node) else leaf, (node.args, node.kwargs))
    return (f"{node.target}{shown}" if pure else f"{node.target} {node.name}",)


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of what a node computes; (-1,) of what is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (-1,)


def _all_like(node: fx.Node) -> bool:
    """Whether all arguments are tensors like the result."""
    value = node.meta["val"]
    given = [arg.meta.get("val") for arg in node.args if isinstance(arg, fx.Node)]
    return len(given) == len(node.args) and all(
        isinstance(v, torch.Tensor) and v.shape == value.shape and v.dtype == value.dtype for v in given
    )


def _order_of(node: fx.Node) -> list[int]:
    """The dims of a node's source in the order in which it has them."""
    ndim, dims = node.meta["val"].ndim, node.args[1:]
    if node.target is aten.permute.default:
        return [int(dim) % ndim for dim in dims[0]]  # type: ignore[union-attr,arg-type]
    one, two = (int(dim) % ndim for dim in dims)  # type: ignore[arg-type]
    order = list(range(ndim))
    order[one], order[two] = two, one
    return order


def _bounds(node: fx.Node) -> tuple[int, int, int] | None:
    """(dim, start, end) of a slice that leaves nothing out in between."""
    source: Any = node.args[0]
    shape = shape_of(source)
    given: tuple[Any, ...] = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, start, end, step = given
    length = shape[dim % len(shape)]
    start, end = (
        0 if start is None else max(min(start + length if start < 0 else start, length), 0),
        length if end is None else max(min(end + length if end < 0 else end, length), 0),
    )
    return (dim % len(shape), start, end) if step == 1 and start < end else None
