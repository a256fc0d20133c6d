"""Products where ranks add up, and convolutions by channels."""

import operator

from torch import fx

from plait.graph.ops.scaled import SCALED_GRADIENT, suits
from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings.own_shard import of_input
from plait.program.place.placement import P, R, Shard
from plait.program.place.rules.base import aten, ours


@lower(aten.addmm, aten.baddbmm, empty=True)
def addmm(site: Site) -> Local:
    """A rank without a share of what is summed still adds its part of the term."""
    if site.is_empty() and P not in of_input(site, 0):
        return site.nothing()
    return _product(site, *site.args) if site.in_short else site.same(*site.args)


@lower(aten.mm)
def mm(site: Site) -> Local:
    if site.in_short_gradient:
        return _gradient(site, *site.args)
    return _product(site, None, *site.args) if site.in_short else site.same(*site.args)


def _product(site: Site, bias: fx.Node | None, a: fx.Node, b: fx.Node) -> Local:
    """In 8 bits, where this rank's part of it has a shape for which there is a kernel."""
    (rows, depth), columns = a.meta["val"].shape, b.meta["val"].shape[1]
    if not suits(rows, depth, columns):
        return site.same(*site.args)
    if site.feeds is not None and suits(depth, rows, columns):
        _transposed(site, a, site.feeds)  # here: so it is kept in 8 bits from forward to backward, not in 16
        if site.feeds == "activation":
            return site.emit(ours.rounded_product.default, *_rows(site, a), b, bias)
    return site.emit(ours.scaled_product.default, a, b, bias)


def _gradient(site: Site, turned: fx.Node, activation: fx.Node) -> Local:
    """The same for the gradient of a weight, both of whose factors are rounded anyway."""
    (rows, depth), columns = turned.meta["val"].shape, activation.meta["val"].shape[1]
    if turned.target is not aten.t.default or not suits(rows, depth, columns):
        return site.same(*site.args)
    gradient = turned.args[0]
    assert isinstance(gradient, fx.Node)
    factors = (_transposed(site, gradient, "gradient"), _transposed(site, activation, "activation"))
    shorts, scales = zip(*factors, strict=True)
    return site.emit(SCALED_GRADIENT, *shorts, *scales)


def _transposed(site: Site, x: fx.Node, role: str) -> tuple[fx.Node, fx.Node]:
    if role == "activation":
        return _both(site, site.once(ours.transposed_rows.default, *_rows(site, x)))
    return _both(site, site.once(ours.transposed_short.default, x))


def _rows(site: Site, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    return _both(site, site.once(ours.rounded_rows.default, x))


def _both(site: Site, made: fx.Node) -> tuple[fx.Node, fx.Node]:
    return site.once(operator.getitem, made, 0), site.once(operator.getitem, made, 1)


@lower(aten.convolution, empty=True)
def convolution(site: Site) -> Local:
    bias = site.args[2]
    if site.is_empty():
        if bias is None or P not in of_input(site, 2):
            return site.nothing()
        shape = site.shape()
        return site.emit(aten.expand.default, site.emit(aten.view.default, bias, _by_channel(shape)), shape)
    return site.same(*site.args[:8], local_groups(site, 0, site.args[8]))


@lower(aten.convolution_backward, empty=True)
def convolution_backward(site: Site) -> Local:
    """The gradient of the bias is whole where the channels that come in are cut, also on a rank that has none."""
    grad, bias_sizes = site.args[0], site.args[3]
    has_bias = bias_sizes is not None and site.args[10][2]
    if site.is_empty():
        outputs = site.nothing()
        assert isinstance(outputs, list)
        places = zip(site.axes, site.coordinates, site.strategies, strict=True)
        without = [s for axis, own, s in places if axis.units[own] == 0]
        whole = all(s.outputs[2] == R for s in without if any(isinstance(p, Shard) for p in s.inputs))
        if has_bias and whole:
            dims = [dim for dim in range(grad.meta["val"].ndim) if dim != 1]
            outputs[2] = site.emit(aten.sum.dim_IntList, grad, dims)
        return outputs
    sizes = [grad.meta["val"].shape[1]] if bias_sizes is not None else None
    groups = local_groups(site, 1, site.args[9])
    return site.same(*site.args[:3], sizes, *site.args[4:9], groups, site.args[10])


def local_groups(site: Site, position: int, groups: int) -> int:
    """The groups of channels that a rank has: both sides of a convolution are cut only where groups are."""
    for axis, coordinate, strategy in zip(site.axes, site.coordinates, site.strategies, strict=True):
        cut = strategy.inputs[position]
        other = strategy.outputs[0] if position == 0 else strategy.inputs[0]
        if isinstance(cut, Shard) and isinstance(other, Shard) and cut.dim == other.dim == 1:
            groups = axis.local(groups, coordinate)
    return groups


def _by_channel(shape: list[int]) -> list[int]:
    return [1, shape[1], *(1 for _ in shape[2:])]
