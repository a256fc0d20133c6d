"""Normalization whose statistics are those of all ranks that have samples or rows of a channel."""

import operator
from math import prod
from typing import Any

from torch import fx

from plait.plan.plan import DATA
from plait.program.local import functions as local
from plait.program.local import spatial as local_spatial
from plait.program.local.communicate import all_gather, all_reduce
from plait.program.local.lowering import Local, Site, lower
from plait.program.place.placement import Shard
from plait.program.place.rules.base import aten, ours


def _meeting(
    site: Site, position: int, *, skip: tuple[str, ...] = (), dims: range | None = None
) -> list[int]:
    """The axes whose ranks have different elements of a channel of a tensor argument: samples or rows are cut."""
    found = []
    for index, (axis, strategy) in enumerate(zip(site.axes, site.strategies, strict=True)):
        placement = strategy.inputs[position]
        if axis.size == 1 or axis.name in skip or not isinstance(placement, Shard) or placement.dim == 1:
            continue
        if dims is None or placement.dim in dims:
            found.append(index)
    return found


def _joint(site: Site, meeting: list[int]) -> str:
    return "+".join(site.axes[index].name for index in meeting)


def _fractions(site: Site, meeting: list[int]) -> list[int]:
    """Each rank's units, for the ranks of some axes together: the last axis varies fastest."""
    found = [1]
    for index in meeting:
        found = [before * units for before in found for units in site.axes[index].units]
    return found


@lower(ours.batch_norm)
def batch_norm(site: Site) -> Local:
    """Samples are on `data`: with local statistics only they are kept apart."""
    alone = _meeting(site, 0)
    apart = [index for index in alone if site.local_batch_norm and site.axes[index].name == DATA]
    meeting = [index for index in alone if index not in apart]
    if site.is_empty() and (apart or not meeting):
        own: Local = site.nothing()
    else:
        own = _met_batch_norm(site, meeting) if meeting else site.same(*site.args)
    if not apart:
        return own
    parts = own if isinstance(own, list) else [site.emit(operator.getitem, own, index) for index in range(5)]
    axis, coordinate = site.axes[apart[0]], site.coordinates[apart[0]]
    fraction = axis.units[coordinate] / max(axis.total, 1)
    averaged = [  # all ranks keep the same running statistics
        site.emit(all_reduce, site.emit(local.weighted_share, value, fraction), axis.name)
        for value in parts[3:]
    ]
    return [*parts[:3], *averaged]


def _met_batch_norm(site: Site, meeting: list[int]) -> list[fx.Node]:
    x, weight, bias, mean, var, momentum, eps = site.args
    counts = _fractions(site, meeting)
    rows = site.emit(local.batch_statistics, x, mean)
    rows = site.emit(all_gather, rows, _joint(site, meeting), 0, [1] * len(counts))
    both = site.emit(local.combine_statistics, rows, counts)
    batch_mean, batch_var = site.emit(operator.getitem, both, 0), site.emit(operator.getitem, both, 1)
    return [
        site.emit(local.normalize, x, weight, bias, batch_mean, batch_var, eps),
        batch_mean,
        site.emit(local.inverse_deviation, batch_var, eps),
        site.emit(local.running_average, mean, batch_mean, momentum),
        site.emit(local.running_variance, var, batch_var, momentum, _count(site, 0, meeting)),
    ]


def _count(site: Site, position: int, meeting: list[int]) -> int:
    """Elements of a channel that the ranks which meet have together."""
    whole = site.node.args[position].meta["val"]  # type: ignore[union-attr]
    count = whole.numel() // max(whole.shape[1], 1)
    for index, (axis, coordinate) in enumerate(zip(site.axes, site.coordinates, strict=True)):
        if index in _meeting(site, position) and index not in meeting:
            count = axis.local(count, coordinate)
    return int(count)


@lower(ours.batch_norm_backward)
def batch_norm_backward(site: Site) -> Local:
    meeting = _meeting(site, 1, skip=(DATA,) if site.local_batch_norm else ())
    if not meeting or (site.local_batch_norm and site.is_empty()):
        return site.nothing() if site.is_empty() else site.same(*site.args)
    grad, x, weight, mean, invstd, eps = site.args
    own = site.emit(local.gradient_sums, grad, x, mean, invstd, eps)
    grad_weight, grad_bias = site.emit(local.take_row, own, 0), site.emit(local.take_row, own, 1)
    sums = site.emit(all_reduce, own, _joint(site, meeting))
    count = _count(site, 1, meeting)
    return [
        site.emit(local.input_gradient, grad, x, weight, mean, invstd, sums, count),
        grad_weight,
        grad_bias,
    ]


def _local_sizes(x: Any, groups: int, channels: int) -> tuple[int, int, int, int]:
    """(samples, channels, rows, groups) of a shard."""
    samples, own, *rows = x.meta["val"].shape
    return samples, own, prod(rows), groups * own // channels


@lower(aten.native_group_norm)
def group_norm(site: Site) -> Local:
    x, weight, bias, _, channels, _, groups, eps = site.args
    sizes = _local_sizes(x, groups, channels)
    meeting = _meeting(site, 0, dims=range(2, x.meta["val"].ndim))
    if not meeting:
        return site.same(site.emit(local_spatial.laid_out, x), weight, bias, *sizes, eps)
    rows = site.emit(local_spatial.group_statistics, x, sizes[3])
    ranks = len(_fractions(site, meeting))
    rows = site.emit(all_gather, rows, _joint(site, meeting), 0, [1] * ranks)
    both = site.emit(local_spatial.combine_groups, rows, eps)
    mean, rstd = site.emit(operator.getitem, both, 0), site.emit(operator.getitem, both, 1)
    y = site.emit(local_spatial.normalize_groups, x, weight, bias, mean, rstd)
    dtype = site.node.meta["val"][1].dtype
    return [y, *(site.emit(local_spatial.rounded, statistic, dtype) for statistic in (mean, rstd))]


@lower(aten.native_group_norm_backward)
def group_norm_backward(site: Site) -> Local:
    grad, x, mean, rstd, weight, _, channels, _, groups, mask = site.args
    sizes = _local_sizes(x, groups, channels)
    meeting = _meeting(site, 1, dims=range(2, x.meta["val"].ndim))
    if not meeting:
        x = site.emit(local_spatial.laid_out, x)
        return site.same(site.emit(local_spatial.laid_out_as, grad, x), x, mean, rstd, weight, *sizes, mask)
    own = site.emit(local_spatial.group_sums, grad, x)
    sums = site.emit(all_reduce, own, _joint(site, meeting))
    dtype = x.meta["val"].dtype if weight is None else weight.meta["val"].dtype
    both = site.emit(local_spatial.group_weight_gradients, own, mean, rstd, dtype)
    ranks = len(_fractions(site, meeting))
    count = sizes[1] // sizes[3] * sizes[2] * ranks
    return [
        site.emit(local_spatial.group_input_gradient, grad, x, weight, mean, rstd, sums, count),
        site.emit(operator.getitem, both, 0),
        site.emit(operator.getitem, both, 1),
    ]


@lower(aten._weight_norm_interface, aten._weight_norm_interface_backward)
def weight_norm(site: Site) -> Local:
    """Weights may lie with their channels last; torch's kernels do not look."""
    *tensors, dim = site.args
    return site.same(*(site.emit(local_spatial.in_order, tensor) for tensor in tensors), dim)
