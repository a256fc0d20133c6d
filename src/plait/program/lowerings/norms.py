"""Normalization whose statistics are those of all ranks."""

from plait.program import local_functions as local
from plait.program.communicate import all_gather, all_reduce
from plait.program.lowering import Local, Site, item, lower
from plait.program.placement import AxisShares
from plait.program.rules.base import aten, ours


@lower(aten.native_group_norm)
def group_norm(site: Site) -> Local:
    return site.same(*site.args[:3], site.shape()[0], *site.args[4:])


@lower(aten.native_group_norm_backward)
def group_norm_backward(site: Site) -> Local:
    return site.same(*site.args[:5], site.shape()[0], *site.args[6:])


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
    batch_mean, batch_var = site.emit(item, both, 0), site.emit(item, both, 1)
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
    parts = own if isinstance(own, list) else [site.emit(item, own, index) for index in range(5)]
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
