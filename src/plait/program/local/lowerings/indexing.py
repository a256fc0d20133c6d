"""Indexing along a dim that is cut: a rank finds and writes what it has, and what it lacks goes to a spare slot."""

from typing import Any

import torch
from torch import Tensor, fx

from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings.own_shard import OwnShard, in_range, of_input, own_index, own_shard
from plait.program.place.placement import P
from plait.program.place.rules.base import aten


def own_found(
    x: Tensor, dim: int, index: Tensor, outer: int, part: int, own: int, per_unit: int, offset: int
) -> Tensor:
    """`x[..., index, ...]` where this rank has the index, zeros where it does not."""
    extent = outer * part
    local, inside = own_index(in_range(index, extent, -extent) % extent, outer, part, own, per_unit, offset)
    found = aten.index.Tensor(x, [*(None,) * dim, local])
    trailing = (1,) * (x.ndim - dim - 1)
    return found.masked_fill_(~inside.view(*inside.shape, *trailing), 0)  # type: ignore[no-any-return]


@lower(aten.index, aten._unsafe_index)
def index(site: Site) -> Local:
    x, indices = site.args
    first = next(i for i, entry in enumerate(indices) if entry is not None)
    own = _own_shard(site, first)
    if own is None:
        return site.same(*site.args)
    return site.emit(own_found, x, first, indices[first], *own.arguments)


@lower(aten.index_select)
def index_select(site: Site) -> Local:
    x, dim, picked = site.args
    dim %= x.meta["val"].ndim
    own = _own_shard(site, dim)
    return site.same(*site.args) if own is None else site.emit(own_found, x, dim, picked, *own.arguments)


def own_gathered(
    x: Tensor, dim: int, index: Tensor, outer: int, part: int, own: int, per_unit: int, offset: int
) -> Tensor:
    """`gather` where this rank has the index, zeros where it does not."""
    local, inside = own_index(in_range(index, outer * part), outer, part, own, per_unit, offset)
    return x.gather(dim, local).masked_fill_(~inside, 0)


@lower(aten.gather)
def gather(site: Site) -> Local:
    x, dim, picked = site.args[:3]
    dim %= max(x.meta["val"].ndim, 1)
    own = _own_shard(site, dim)
    return site.same(*site.args) if own is None else site.emit(own_gathered, x, dim, picked, *own.arguments)


def own_slots(index: Tensor, outer: int, part: int, own: int, per_unit: int, offset: int) -> Tensor:
    """Indices of a rank's shard; the slot after its last one for what it does not have."""
    extent = outer * part
    local, inside = own_index(in_range(index, extent, -extent) % extent, outer, part, own, per_unit, offset)
    return torch.where(inside, local, outer * own)


@lower(aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_add, empty=True)
def scatter(site: Site) -> Local:
    if site.is_empty() and P not in of_input(site, 0):
        return site.nothing()
    x, dim, picked, *rest = site.args
    dim %= max(x.meta["val"].ndim, 1)
    own = _own_shard(site, dim)
    if own is None:
        return site.same(*site.args)
    slots = site.emit(own_slots, picked, *own.arguments)
    return _without_spare(site, site.same(_with_spare(site, x, dim), dim, slots, *rest), dim, own)


@lower(aten.index_put, aten._unsafe_index_put)
def index_put(site: Site) -> Local:
    x, indices, *rest = site.args
    first = next(i for i, entry in enumerate(indices) if entry is not None)
    own = _own_shard(site, first)
    if own is None:
        return site.same(*site.args)
    slots: list[Any] = list(indices)
    slots[first] = site.emit(own_slots, indices[first], *own.arguments)
    return _without_spare(site, site.same(_with_spare(site, x, first), slots, *rest), first, own)


def _own_shard(site: Site, dim: int) -> OwnShard | None:
    shape = site.node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return own_shard(site, of_input(site, 0), dim, shape[dim]) if shape else None


def _with_spare(site: Site, x: fx.Node, dim: int) -> fx.Node:
    pads = [0, 0] * (x.meta["val"].ndim - 1 - dim) + [0, 1]
    return site.emit(aten.constant_pad_nd.default, x, pads)


def _without_spare(site: Site, value: fx.Node, dim: int, own: OwnShard) -> fx.Node:
    outer, _, extent, _, _ = own.arguments
    kept = site.emit(aten.slice.Tensor, value, dim, 0, outer * extent)
    return site.emit(aten.clone.default, kept, memory_format=torch.contiguous_format)
