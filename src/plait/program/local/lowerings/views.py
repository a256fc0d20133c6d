"""Splits, slices and single indices of a dim that is cut."""

from collections.abc import Sequence

from torch import Tensor

from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings.own_shard import cutting, of_input, of_output, own_position, own_shard
from plait.program.place.rules.base import aten
from plait.program.place.rules.views import slice_start


@lower(
    aten.split, aten.split_with_sizes, aten.chunk, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk
)  # fmt: skip
def split(site: Site) -> Local:
    dim = _argument(site, 2, "dim", 0)
    if not cutting(site, of_input(site, 0), dim % len(site.shape())):
        return site.same(*site.args)
    sizes = [site.shape(i)[dim] for i in range(len(site.node.meta["val"]))]
    return site.emit(aten.split_with_sizes.default, site.args[0], sizes, dim)


@lower(aten.slice)
def take_slice(site: Site) -> Local:
    x = site.args[0]
    dim = _argument(site, 1, "dim", 0) % len(site.shape())
    if not cutting(site, of_input(site, 0), dim):
        return site.same(*site.args)
    extent, own = site.node.args[0].meta["val"].shape[dim], x.meta["val"].shape[dim]  # type: ignore[union-attr]
    start = slice_start(_argument(site, 2, "start", 0), extent) * own // extent
    return site.emit(aten.slice.Tensor, x, dim, start, start + site.shape()[dim])


@lower(aten.slice_backward)
def slice_backward(site: Site) -> Local:
    grad, _, dim, start, _, step = site.args
    shape = site.shape()
    dim %= len(shape)
    if not cutting(site, of_input(site, 0), dim):
        return site.same(grad, shape, *site.args[2:])
    extent = site.node.meta["val"].shape[dim]
    first = slice_start(start, extent) * shape[dim] // extent
    return site.same(grad, shape, dim, first, first + grad.meta["val"].shape[dim], step)


def own_selection(
    x: Tensor, dim: int, index: int, outer: int, part: int, own: int, per_unit: int, offset: int
) -> Tensor:
    """One index of a dim, where this rank has it; zeros where it does not."""
    position = own_position(index, outer, part, own, per_unit, offset)
    if position is None:
        return x.new_zeros([*x.shape[:dim], *x.shape[dim + 1 :]])
    return x.select(dim, position).clone()


@lower(aten.select)
def select(site: Site) -> Local:
    x, dim, index = site.args
    shape = site.node.args[0].meta["val"].shape  # type: ignore[union-attr]
    dim %= len(shape)
    own = own_shard(site, of_input(site, 0), dim, shape[dim])
    if own is None:
        return site.same(*site.args)
    return site.emit(own_selection, x, dim, index % shape[dim], *own.arguments)


def own_selection_gradient(
    grad: Tensor,
    shape: Sequence[int],
    dim: int,
    index: int,
    outer: int,
    part: int,
    own: int,
    per_unit: int,
    offset: int,
) -> Tensor:
    """The gradient of one index of a dim, among zeros, where this rank has it."""
    result = grad.new_zeros(shape)
    position = own_position(index, outer, part, own, per_unit, offset)
    if position is not None:
        result.select(dim, position).copy_(grad)
    return result


@lower(aten.select_backward)
def select_backward(site: Site) -> Local:
    grad, _, dim, index = site.args
    shape = site.node.meta["val"].shape
    dim %= len(shape)
    own = own_shard(site, of_output(site), dim, shape[dim])
    if own is None:
        return site.same(grad, site.shape(), *site.args[2:])
    return site.emit(own_selection_gradient, grad, site.shape(), dim, index % shape[dim], *own.arguments)


def _argument(site: Site, position: int, name: str, default: int) -> int:
    value = site.args[position] if len(site.args) > position else site.kwargs.get(name, default)
    return default if value is None else int(value)
