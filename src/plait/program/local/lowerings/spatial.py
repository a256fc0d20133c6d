"""Windows that slide over rows of several ranks: rows of the neighbours before, sums of what lies on them after.

`halo` brings a rank the rows that its windows reach into; its transpose, `halo_add`, takes gradients back to the ranks
they belong to. The op itself runs without padding on the dims that are cut: the halo holds it at the two ends.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from plait.program.local import spatial as local
from plait.program.local.communicate import halo, halo_add
from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings import products
from plait.program.place.placement import Shard
from plait.program.place.rules.base import Op, aten
from plait.program.place.rules.spatial import Window, convolution_window, num_spatial, per_dim, pool_window


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A spatial dim that one axis cuts."""

    axis: int
    """Index of the axis."""
    dim: int
    window: Window


def cuts_of(site: Site, first: int, window: Callable[[Op, int], Window | None]) -> list[Cut]:
    """The spatial dims, from `first` on, of which ranks have shards."""
    found = []
    for index, (axis, strategy) in enumerate(zip(site.axes, site.strategies, strict=True)):
        placement = strategy.inputs[0]
        if axis.size > 1 and isinstance(placement, Shard) and placement.dim >= first:
            reach = window(Op(site.node, axis), placement.dim)
            assert reach is not None, f"{site.node} is cut where its windows do not line up"
            found.append(Cut(axis=index, dim=placement.dim, window=reach))
    return found


def with_halos(site: Site, x: fx.Node, cuts: Sequence[Cut], fill: float = 0.0) -> fx.Node:
    """A shard with the rows of its neighbours."""
    for cut in cuts:
        if cut.window.before or cut.window.after:
            name = site.axes[cut.axis].name
            x = site.emit(halo, x, name, cut.dim, cut.window.before, cut.window.after, fill)
    return x


def without_halos(site: Site, x: fx.Node, cuts: Sequence[Cut]) -> fx.Node:
    """A shard plus what its neighbours have for it."""
    for cut in reversed(cuts):
        if cut.window.before or cut.window.after:
            x = site.emit(halo_add, x, site.axes[cut.axis].name, cut.dim, cut.window.before, cut.window.after)
    return x


def _set(
    values: object, cuts: Sequence[Cut], first: int, spatial: int, entry: Callable[[Cut], int]
) -> list[int]:
    """An argument with one entry per spatial dim, changed on the dims that are cut."""
    filled = [per_dim(values, index, 0) for index in range(spatial)]
    for cut in cuts:
        filled[cut.dim - first] = entry(cut)
    return filled


@lower(aten.convolution, empty=True)
def convolution(site: Site) -> Local:
    """Instead of the lowering by samples and channels, which it calls where no row is cut."""
    cuts = [] if site.is_empty() else cuts_of(site, 2, convolution_window)
    if not cuts:
        return products.convolution(site)
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = site.args
    spatial = len(weight.meta["val"].shape) - 2
    padding = _set(padding, cuts, 2, spatial, lambda cut: 0)
    groups = products.local_groups(site, 0, groups)
    if not transposed:
        x = with_halos(site, x, cuts)
        return site.same(x, weight, bias, stride, padding, dilation, False, extra, groups)
    extra = _set(extra, cuts, 2, spatial, lambda cut: cut.window.unread)
    wide = site.same(x, weight, None, stride, padding, dilation, True, extra, groups)
    y = without_halos(site, wide, cuts)
    return y if bias is None else site.emit(local.add_bias, y, bias)


@lower(aten.convolution_backward, empty=True)
def convolution_backward(site: Site) -> Local:
    """Likewise."""
    cuts = [] if site.is_empty() else cuts_of(site, 2, convolution_window)
    if not cuts:
        return products.convolution_backward(site)
    grad, x, weight, sizes, stride, padding, dilation, transposed, extra, groups, mask = site.args
    spatial = len(weight.meta["val"].shape) - 2
    padding = _set(padding, cuts, 2, spatial, lambda cut: 0)
    groups = products.local_groups(site, 1, groups)
    if transposed:
        extra = _set(extra, cuts, 2, spatial, lambda cut: cut.window.unread)
        wide = with_halos(site, grad, cuts)
        mask = [mask[0], mask[1], False]
        both = site.same(wide, x, weight, None, stride, padding, dilation, True, extra, groups, mask)
        return [
            *(site.emit(operator.getitem, both, index) for index in (0, 1)),
            site.emit(local.bias_gradient, grad),
        ]
    wide = with_halos(site, x, cuts)
    sizes = [grad.meta["val"].shape[1]] if sizes is not None else None
    all_three = site.same(grad, wide, weight, sizes, stride, padding, dilation, False, extra, groups, mask)
    grads = [site.emit(operator.getitem, all_three, index) for index in range(3)]
    return [without_halos(site, grads[0], cuts) if mask[0] else grads[0], *grads[1:]]


@lower(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
def max_pool(site: Site) -> Local:
    """The positions that come out are those in the whole image, however it is cut."""
    op, spatial, first, cuts = _pooling(site)
    if not cuts:
        return site.same(*site.args)
    wide = with_halos(site, site.args[0], cuts, -torch.inf)
    padding = _set(op.arg("padding"), cuts, first, spatial, lambda cut: 0)
    sizes = (op.arg("kernel_size"), op.arg("stride"), padding, op.arg("dilation"), op.arg("ceil_mode"))
    both = site.same(wide, *sizes)
    values, indices = site.emit(operator.getitem, both, 0), site.emit(operator.getitem, both, 1)
    extents, whole = wide.meta["val"].shape[first:], op.shapes[0][first:]
    shifts = _starts(site, cuts, first, spatial)
    return [values, site.emit(local.moved_indices, indices, list(extents), shifts, list(whole))]


@lower(aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward)
def max_pool_backward(site: Site) -> Local:
    op, spatial, first, cuts = _pooling(site)
    if not cuts:
        return site.same(*site.args)
    grad, x, size, stride, padding, dilation, ceil_mode, indices = site.args
    padding = _set(padding, cuts, first, spatial, lambda cut: 0)
    wide = site.emit(local.resized_like, x, _wide_shape(x, cuts))
    shifts = [
        shift if isinstance(shift, int) else site.emit(local.opposite, shift)
        for shift in _starts(site, cuts, first, spatial)
    ]
    extents, whole = wide.meta["val"].shape[first:], op.shapes[1][first:]
    own = site.emit(local.moved_indices, indices, list(whole), shifts, list(extents))
    result = site.same(grad, wide, size, stride, padding, dilation, ceil_mode, own)
    return without_halos(site, result, cuts)


def _pooling(site: Site) -> tuple[Op, int, int, list[Cut]]:
    """The op, its number of spatial dims, the first of them, and those that are cut."""
    op = Op(site.node, site.axes[0])
    spatial = num_spatial(op)
    first = len(op.out) - spatial
    return op, spatial, first, cuts_of(site, first, pool_window)


def _starts(site: Site, cuts: Sequence[Cut], first: int, spatial: int) -> list[int | fx.Node]:
    """Where this rank's shard with its halo starts in the whole, per spatial dim; known when the step runs."""
    starts: list[int | fx.Node] = [0] * spatial
    source = site.node.args[1 if "backward" in str(site.node.target) else 0]
    assert isinstance(source, fx.Node)
    for cut in cuts:
        rows = source.meta["val"].shape[cut.dim] // site.axes[cut.axis].total
        starts[cut.dim - first] = site.emit(local.first_row, site.offset(cut.axis), rows, cut.window.before)
    return starts


def _wide_shape(x: fx.Node, cuts: Sequence[Cut]) -> list[int]:
    shape = list(x.meta["val"].shape)
    for cut in cuts:
        shape[cut.dim] += cut.window.before + cut.window.after
    return shape


@lower(aten.avg_pool2d, aten.avg_pool3d)
def average_pool(site: Site) -> Local:
    op, spatial, first, cuts = _pooling(site)
    if not cuts:
        return site.same(*site.args)
    wide = with_halos(site, site.args[0], cuts)
    padding = _set(op.arg("padding"), cuts, first, spatial, lambda cut: 0)
    rest = (op.arg("ceil_mode"), op.arg("count_include_pad"), op.arg("divisor_override"))
    return site.same(wide, op.arg("kernel_size"), op.arg("stride"), padding, *rest)


@lower(aten.avg_pool2d_backward, aten.avg_pool3d_backward)
def average_pool_backward(site: Site) -> Local:
    _, spatial, first, cuts = _pooling(site)
    if not cuts:
        return site.same(*site.args)
    grad, x, size, stride, padding, *rest = site.args
    padding = _set(padding, cuts, first, spatial, lambda cut: 0)
    wide = site.emit(local.resized_like, x, _wide_shape(x, cuts))
    return without_halos(site, site.same(grad, wide, size, stride, padding, *rest), cuts)


@lower(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d)
def adaptive_pool(site: Site) -> Local:
    """To one row of all ranks: each has a part of the mean."""
    spatial = num_spatial(Op(site.node, site.axes[0]))
    y = site.same(site.args[0], site.shape()[-spatial:])
    count = _ranks_of_means(site, 0, len(site.node.meta["val"].shape) - spatial)
    return y if count == 1 else site.emit(local.divide, y, count)


@lower(aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward)
def adaptive_pool_backward(site: Site) -> Local:
    spatial = num_spatial(Op(site.node, site.axes[0]))
    count = _ranks_of_means(site, 1, len(site.node.meta["val"].shape) - spatial)
    grad = site.args[0] if count == 1 else site.emit(local.divide, site.args[0], count)
    return site.same(grad, *site.args[1:])


def _ranks_of_means(site: Site, image: int, first: int) -> int:
    """Ranks that have rows of one mean."""
    count = 1
    for axis, strategy in zip(site.axes, site.strategies, strict=True):
        placement = strategy.inputs[image]
        result = strategy.inputs[0] if image else strategy.outputs[0]
        if isinstance(placement, Shard) and placement.dim >= first and not isinstance(result, Shard):
            count *= axis.size
    return count


@lower(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d)
def upsample_nearest(site: Site) -> Local:
    """The size of the local shard, where the op is told one."""
    spatial = num_spatial(Op(site.node, site.axes[0]))
    size = None if site.args[1] is None else site.shape()[-spatial:]
    return site.same(site.args[0], size, *site.args[2:])


@lower(aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward, aten.upsample_nearest3d_backward)
def upsample_nearest_backward(site: Site) -> Local:
    spatial = num_spatial(Op(site.node, site.axes[0]))
    size = list(site.args[0].meta["val"].shape[-spatial:])
    return site.same(site.args[0], size, site.shape(), *site.args[3:])
