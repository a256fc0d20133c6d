"""Layer norm over dims that ranks hold shards of: the statistics of whole rows are exchanged, two numbers a row."""

import operator
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, fx

from plait.program.local.communicate import all_gather, all_reduce
from plait.program.local.functions import combine_statistics
from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings.own_shard import cutting, is_empty_beside, of_input
from plait.program.local.lowerings.softmax import wide
from plait.program.place.rules.base import aten


def row_statistics(x: Tensor, inner: int) -> Tensor:
    """Mean and biased variance of the shard's last `inner` dims, as one [1, 2, rows] entry; zeros of an empty shard."""
    count = prod(x.shape[: x.ndim - inner])
    if not x.numel():
        return wide(x).new_zeros((1, 2, count))
    var, mean = torch.var_mean(wide(x).reshape(count, -1), dim=1, correction=0)
    return torch.stack((mean, var)).unsqueeze(0)


def joined_statistics(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The statistics of several ranks' shards as those of one shard."""
    return torch.stack(combine_statistics(rows, counts)).unsqueeze(0)


def own_normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    """The shard, normalized with the statistics of whole rows."""
    y = (wide(x) - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def mean_and_rstd(
    rows: Tensor, eps: float, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What layer norm gives beside its result."""
    mean, var = rows[0].reshape(2, *shape).unbind(0)
    return mean.to(dtype), torch.rsqrt(var + eps).to(dtype)


@lower(aten.native_layer_norm, empty=True)
def layer_norm(site: Site) -> Local:
    x, normalized, weight, bias, eps = site.args
    axes = _meeting(site, 0, len(normalized))
    if is_empty_beside(site, axes):
        return site.nothing()
    if not axes:
        return site.same(*site.args)
    rows = site.emit(row_statistics, x, len(normalized))
    for index in axes:
        axis = site.axes[index]
        rows = site.emit(all_gather, rows, axis.name, 0, [1] * axis.size)
        rows = site.emit(joined_statistics, rows, list(axis.units))
    both = site.emit(mean_and_rstd, rows, eps, site.shape(1), site.node.meta["val"][1].dtype)
    mean, rstd = site.emit(operator.getitem, both, 0), site.emit(operator.getitem, both, 1)
    return [site.emit(own_normalized, x, weight, bias, mean, rstd), mean, rstd]


def row_sums(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, inner: int
) -> Tensor:
    """[2, rows]: the shard's sums of the gradient before the scale, alone and times the normalized input."""
    scaled = wide(grad) if weight is None else wide(grad) * weight
    dims = list(range(x.ndim - inner, x.ndim))
    hat = (wide(x) - mean) * rstd
    return torch.stack((scaled.sum(dims, keepdim=True), (scaled * hat).sum(dims, keepdim=True)))


def own_gradient(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, sums: Tensor, count: int
) -> Tensor:
    """Gradient of the shard, given the sums over whole rows of `count` elements."""
    scaled = wide(grad) if weight is None else wide(grad) * weight
    hat = (wide(x) - mean) * rstd
    return (rstd * (scaled - (sums[0] + hat * sums[1]) / count)).to(x.dtype)


def own_scale_gradient(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, inner: int) -> Tensor:
    """Gradient of the shard of the scale."""
    product = wide(grad) * ((wide(x) - mean) * rstd)
    return product.sum(list(range(x.ndim - inner))).to(x.dtype) if x.ndim > inner else product.to(x.dtype)


def own_shift_gradient(grad: Tensor, inner: int) -> Tensor:
    """Gradient of the shard of the shift."""
    return grad.sum(list(range(grad.ndim - inner))) if grad.ndim > inner else grad.clone()


@lower(aten.native_layer_norm_backward, empty=True)
def layer_norm_backward(site: Site) -> Local:
    grad, x, normalized, mean, rstd, weight, _, mask = site.args
    inner = len(normalized)
    axes = _meeting(site, 1, inner)
    if is_empty_beside(site, axes):
        return site.nothing()
    if not axes:
        return site.same(*site.args)
    sums = site.emit(row_sums, grad, x, mean, rstd, weight, inner)
    for index in axes:
        sums = site.emit(all_reduce, sums, site.axes[index].name)
    count = prod(normalized)
    outputs: list[fx.Node] = [
        site.emit(own_gradient, grad, x, mean, rstd, weight, sums, count),
        site.emit(own_scale_gradient, grad, x, mean, rstd, inner),
        site.emit(own_shift_gradient, grad, inner),
    ]
    absent = site.nothing()
    assert isinstance(absent, list)
    return [made if wanted else none for made, none, wanted in zip(outputs, absent, mask, strict=True)]


def _meeting(site: Site, position: int, inner: int) -> list[int]:
    shape = site.node.args[position].meta["val"].shape  # type: ignore[union-attr]
    dims = range(len(shape) - inner, len(shape))
    return sorted({index for dim in dims for index in cutting(site, of_input(site, position), dim)})
