"""Ops whose local form is not the same op on the local pieces.

Entered with `@lower(op, ...)`: a function `(Site) -> fx.Node | list[fx.Node]` that writes the local form of one node,
with `site.emit` and `site.convert`. Everything else is written as the op itself, with the arguments' local pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils import _pytree as pytree

from plait.program import local_functions as local
from plait.program.communicate import all_gather, all_reduce
from plait.program.placement import AxisShares, Partial, Shard, Strategy
from plait.program.rules.base import aten, ours

Local = fx.Node | list[fx.Node]


class Writer(Protocol):
    """What a lowering may ask of the graph under construction."""

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...

    def local_shape(self, node: fx.Node, output: int = 0) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Site:
    """One node to lower: the global node, its local arguments, and how it is cut on each axis."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writer: Writer
    axes: tuple[AxisShares, ...]
    coordinates: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    local_batch_norm: bool

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new local node."""
        return self.writer.emit(target, *args, **kwargs)

    def same(self, *args: Any, **kwargs: Any) -> fx.Node:
        """The op itself with other arguments."""
        return self.emit(self.node.target, *args, **(kwargs or self.kwargs))

    def shape(self, output: int = 0) -> list[int]:
        """Local shape of an output."""
        return self.writer.local_shape(self.node, output)

    def is_partial(self) -> bool:
        """Whether the output is a sum over ranks of some axis, made from shards."""
        return any(
            isinstance(s.outputs[0], Partial) and any(isinstance(p, Shard) for p in s.inputs)
            for s in self.strategies
        )

    def cut_axis(self) -> int | None:
        """The axis whose ranks have pieces of the first tensor's samples, where there are several ranks."""
        for index, (axis, strategy) in enumerate(zip(self.axes, self.strategies, strict=True)):
            first = strategy.inputs[0] if strategy.inputs else None
            if axis.size > 1 and isinstance(first, Shard) and first.dim == 0:
                return index
        return None

    def is_empty(self) -> bool:
        """Whether this rank has no units of an axis along which the op's inputs are cut."""
        return any(
            axis.size > 1
            and axis.units[coordinate] == 0
            and any(isinstance(p, Shard) for p in strategy.inputs)
            for axis, coordinate, strategy in zip(self.axes, self.coordinates, self.strategies, strict=True)
        )

    def nothing(self) -> Local:
        """What an op gives on an empty share: empty pieces and zeros. Many of torch's kernels refuse or crash on it."""
        inputs = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, fx.Node)]
        value = self.node.meta["val"]
        if isinstance(value, torch.Tensor):
            return self.emit(local.nothing, inputs, self.shape(), value.dtype)
        return [
            self.emit(
                local.nothing,
                inputs,
                self.shape(index) if present else [],
                value[index].dtype if present else None,
            )
            for index, present in enumerate(isinstance(entry, torch.Tensor) for entry in value)
        ]


Lowering = Callable[[Site], Local]
_TABLE: dict[Any, Lowering] = {}


def lower(*targets: Any) -> Callable[[Lowering], Lowering]:
    """Enter a lowering for op packets."""

    def enter(function: Lowering) -> Lowering:
        for target in targets:
            _TABLE[target] = function
        return function

    return enter


_MEETS = (ours.batch_norm, ours.batch_norm_backward, aten.nll_loss_forward, aten.nll_loss2d_forward)
"""Ops whose local form communicates: a rank with an empty share must take part."""


def lower_node(site: Site) -> Local:
    """The local form of one node."""
    packet = getattr(site.node.target, "overloadpacket", None)
    special = _TABLE.get(packet)
    if site.is_empty() and packet not in _MEETS:
        return site.nothing()
    return special(site) if special is not None else site.same(*site.args)


@lower(
    aten.view,
    aten._unsafe_view,
    aten.reshape,
    aten._reshape_copy,
    aten.expand,
    aten.new_zeros,
    aten.new_ones,
    aten.new_empty,
    aten.new_full,
    aten.slice_backward,
    aten.select_backward,
)
def size_second(site: Site) -> Local:
    return site.same(site.args[0], site.shape(), *site.args[2:])


@lower(aten.zeros, aten.ones, aten.full, aten.empty)
def size_first(site: Site) -> Local:
    return site.same(site.shape(), *site.args[1:])


@lower(aten.native_group_norm)
def group_norm(site: Site) -> Local:
    return site.same(*site.args[:3], site.shape()[0], *site.args[4:])


@lower(aten.native_group_norm_backward)
def group_norm_backward(site: Site) -> Local:
    return site.same(*site.args[:5], site.shape()[0], *site.args[6:])


@lower(
    aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward, aten.upsample_nearest3d_backward,
    aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward, aten.upsample_linear1d_backward,
    aten.upsample_trilinear3d_backward,
)  # fmt: skip
def upsample_backward(site: Site) -> Local:
    return site.same(*site.args[:2], site.shape(), *site.args[3:])


@lower(aten.mean)
def mean(site: Site) -> Local:
    """Over sharded elements: the local sum over the global count."""
    if not site.is_partial():
        return site.same(*site.args)
    source, result = site.node.args[0].meta["val"], site.node.meta["val"]  # type: ignore[union-attr]
    count = source.numel() // max(result.numel(), 1)
    target = aten.sum.default if site.node.target is aten.mean.default else aten.sum.dim_IntList
    return site.emit(aten.div.Tensor, site.emit(target, *site.args, **site.kwargs), float(count))


_LOSSES = {
    aten.mse_loss: 2, aten.smooth_l1_loss: 2, aten.huber_loss: 2, aten.binary_cross_entropy: 3,
    aten.binary_cross_entropy_with_logits: 4, aten.soft_margin_loss: 2,
}  # fmt: skip


@lower(*_LOSSES)
def elementwise_loss(site: Site) -> Local:
    position = _LOSSES[site.node.target.overloadpacket]  # type: ignore[union-attr]
    reduction = site.args[position] if len(site.args) > position else 1
    if reduction != 1 or not site.is_partial():
        return site.same(*site.args)
    filled = [*site.args, *([None] * (position - len(site.args)))][:position]
    total = site.same(*filled, 2, *site.args[position + 1 :])
    shapes = [arg.meta["val"].shape for arg in site.node.args[:2]]  # type: ignore[union-attr]
    count = torch.broadcast_shapes(*shapes).numel()  # type: ignore[no-untyped-call]
    return site.emit(aten.div.Tensor, total, float(count))


_LOSS_GRADIENTS = {
    aten.mse_loss_backward: 3, aten.smooth_l1_loss_backward: 3, aten.huber_loss_backward: 3,
    aten.binary_cross_entropy_backward: 4, aten.soft_margin_loss_backward: 3,
}  # fmt: skip


@lower(*_LOSS_GRADIENTS)
def elementwise_loss_backward(site: Site) -> Local:
    """The gradient of a mean divides by the number of elements over all ranks."""
    position = _LOSS_GRADIENTS[site.node.target.overloadpacket]  # type: ignore[union-attr]
    reduction = site.args[position] if len(site.args) > position else 1
    if reduction != 1:
        return site.same(*site.args)
    grad = site.emit(aten.div.Tensor, site.args[0], float(site.node.meta["val"].numel()))
    filled = [*site.args[1:], *([None] * (position - len(site.args)))][: position - 1]
    return site.same(grad, *filled, 2, *site.args[position + 1 :])


@lower(aten.nll_loss_forward, aten.nll_loss2d_forward)
def cross_entropy(site: Site) -> Local:
    """A mean in the middle of a graph: the local sum over the weight of all ranks."""
    scores, labels, class_weight, reduction, ignored = site.args
    cut = site.cut_axis()
    if reduction != 1 or cut is None:
        return site.same(*site.args)
    both = site.same(scores, labels, class_weight, 2, ignored)
    total, weight = (site.emit(_item, both, index) for index in (0, 1))
    weight = site.emit(all_reduce, weight, site.axes[cut].name)
    return [site.emit(aten.div.Tensor, total, weight), weight]


def _item(values: Any, index: int) -> Any:
    return values[index]


@lower(ours.bernoulli, ours.uniform, ours.normal, ours.randint)
def random(site: Site) -> Local:
    """The piece of the unsharded tensor that this rank holds; where samples are cut, its start comes with the key."""
    full = [int(extent) for extent in site.node.meta["val"].shape]
    extra: dict[str, Any] = {"full": full, "start": [0] * len(full)}
    for axis, strategy in zip(site.axes, site.strategies, strict=True):
        placement = strategy.outputs[0]
        if isinstance(placement, Shard):
            extra["batch_dim"] = placement.dim
            extra["rows_per_sample"] = full[placement.dim] // max(axis.total, 1)
    key, op, _, *rest = site.args
    return site.same(key, op, site.shape(), *rest, **extra)


@lower(ours.batch_norm)
def batch_norm(site: Site) -> Local:
    cut = site.cut_axis()
    if cut is None:
        return site.same(*site.args)
    x, weight, bias, mean, var, momentum, eps = site.args
    axis, coordinate = site.axes[cut], site.coordinates[cut]
    global_x = site.node.args[0].meta["val"]  # type: ignore[union-attr]
    per_sample = global_x.numel() // global_x.shape[1] // max(axis.total, 1)
    if site.local_batch_norm:
        return _local_batch_norm(site, axis, coordinate)
    rows = site.emit(local.batch_statistics, x, mean)
    rows = site.emit(all_gather, rows, axis.name, 0, [1] * axis.size)
    both = site.emit(local.combine_statistics, rows, [units * per_sample for units in axis.units])
    batch_mean, batch_var = site.emit(_item, both, 0), site.emit(_item, both, 1)
    count = axis.total * per_sample
    return [
        site.emit(local.normalize, x, weight, bias, batch_mean, batch_var, eps),
        batch_mean,
        site.emit(local.inverse_deviation, batch_var, eps),
        site.emit(local.running_average, mean, batch_mean, momentum),
        site.emit(local.running_variance, var, batch_var, momentum, count),
    ]


def _local_batch_norm(site: Site, axis: AxisShares, coordinate: int) -> Local:
    """Statistics of the own share; the running ones become the average over ranks, so that all ranks keep the same."""
    own = site.nothing() if site.is_empty() else site.same(*site.args)
    parts = own if isinstance(own, list) else [site.emit(_item, own, index) for index in range(5)]
    y, mean, invstd, new_mean, new_var = parts
    fraction = axis.units[coordinate] / max(axis.total, 1)
    averaged = [
        site.emit(all_reduce, site.emit(local.weighted_share, value, fraction), axis.name)
        for value in (new_mean, new_var)
    ]
    return [y, mean, invstd, *averaged]


@lower(ours.batch_norm_backward)
def batch_norm_backward(site: Site) -> Local:
    cut = site.cut_axis()
    if cut is None or site.local_batch_norm:
        return site.nothing() if site.is_empty() else site.same(*site.args)
    grad, x, weight, mean, invstd, eps = site.args
    axis = site.axes[cut]
    global_x = site.node.args[1].meta["val"]  # type: ignore[union-attr]
    count = global_x.numel() // global_x.shape[1]
    own = site.emit(local.gradient_sums, grad, x, mean, invstd, eps)
    grad_weight, grad_bias = site.emit(local.take_row, own, 0), site.emit(local.take_row, own, 1)
    sums = site.emit(all_reduce, own, axis.name)
    return [
        site.emit(local.input_gradient, grad, x, weight, mean, invstd, sums, count),
        grad_weight,
        grad_bias,
    ]
