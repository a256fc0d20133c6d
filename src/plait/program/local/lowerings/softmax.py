"""Softmax over a dim that ranks hold shards of: one small exchange of each row's peak and sum."""

import torch
from torch import Tensor, fx

from plait.program.local.communicate import all_gather, all_reduce
from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings.own_shard import cutting, is_empty_beside, of_input
from plait.program.place.rules.base import aten


def wide(x: Tensor) -> Tensor:
    """What torch's kernels compute in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def peak_and_sum(x: Tensor, dim: int) -> Tensor:
    """Per row: the largest element and the sum of exp(x - largest), as two entries of `dim`."""
    x = wide(x)
    if x.shape[dim] == 0:
        shape = [*x.shape[:dim], 1, *x.shape[dim + 1 :]]
        return torch.cat((x.new_full(shape, -torch.inf), x.new_zeros(shape)), dim)
    peak = x.amax(dim, keepdim=True)
    finite = peak.masked_fill(peak == -torch.inf, 0)
    return torch.cat((peak, (x - finite).exp_().sum(dim, keepdim=True)), dim)


def joined(rows: Tensor, dim: int, ranks: int) -> Tensor:
    """Peaks and sums of all ranks as those of one."""
    shape = rows.shape
    peaks, sums = rows.reshape(*shape[:dim], ranks, 2, *shape[dim + 1 :]).unbind(dim + 1)
    peak = peaks.amax(dim, keepdim=True)
    scaled = torch.where(peaks == -torch.inf, 0, (peaks - peak).exp()) * sums
    return torch.cat((peak, scaled.sum(dim, keepdim=True)), dim)


def own_log_softmax(x: Tensor, rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The shard's log-softmax, given the peaks and sums of whole rows."""
    peak, total = rows.narrow(dim, 0, 1), rows.narrow(dim, 1, 1)
    return (wide(x) - peak).sub_(total.log()).to(dtype)


def own_softmax(x: Tensor, rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The shard's softmax, given the peaks and sums of whole rows."""
    peak, total = rows.narrow(dim, 0, 1), rows.narrow(dim, 1, 1)
    return (wide(x) - peak).exp_().div_(total).to(dtype)


def whole_rows(site: Site, x: fx.Node, axes: list[int], dim: int) -> fx.Node:
    """Peaks and sums of whole rows, of which this rank has shards."""
    rows = site.emit(peak_and_sum, x, dim)
    for index in axes:
        axis = site.axes[index]
        rows = site.emit(all_gather, rows, axis.name, dim, [2] * axis.size)
        rows = site.emit(joined, rows, dim, axis.size)
    return rows


@lower(aten._log_softmax, aten._softmax, empty=True)
def softmax(site: Site) -> Local:
    x, dim, _ = site.args
    dim %= max(x.meta["val"].ndim, 1)
    axes = cutting(site, of_input(site, 0), dim)
    if is_empty_beside(site, axes):
        return site.nothing()
    if not axes:
        return site.same(*site.args)
    is_log = site.node.target is aten._log_softmax.default
    rows = whole_rows(site, x, axes, dim)
    return site.emit(own_log_softmax if is_log else own_softmax, x, rows, dim, site.node.meta["val"].dtype)


def row_sum(grad: Tensor, y: Tensor | None, dim: int) -> Tensor:
    """Per row: the sum of the gradient, times y where given."""
    product = wide(grad) if y is None else wide(grad) * wide(y)
    return product.sum(dim, keepdim=True)


def own_log_softmax_gradient(grad: Tensor, y: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the shard, given the sum over whole rows."""
    return (wide(grad) - wide(y).exp().mul_(total)).to(dtype)


def own_softmax_gradient(grad: Tensor, y: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the shard, given the sum over whole rows."""
    return (wide(grad) - total).mul_(wide(y)).to(dtype)


@lower(aten._log_softmax_backward_data, aten._softmax_backward_data, empty=True)
def softmax_backward(site: Site) -> Local:
    grad, y, dim, dtype = site.args
    dim %= max(y.meta["val"].ndim, 1)
    axes = cutting(site, of_input(site, 1), dim)
    if is_empty_beside(site, axes):
        return site.nothing()
    if not axes:
        return site.same(*site.args)
    is_log = site.node.target is aten._log_softmax_backward_data.default
    total = site.emit(row_sum, grad, None if is_log else y, dim)
    for index in axes:
        total = site.emit(all_reduce, total, site.axes[index].name)
    return site.emit(own_log_softmax_gradient if is_log else own_softmax_gradient, grad, y, total, dtype)
