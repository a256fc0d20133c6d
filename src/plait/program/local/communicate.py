"""The communication that a local graph may ask for, as functions that stand in it as nodes.

In a local graph they only describe: on fake tensors they give the shape of the result. `compile` cuts the graph at each
of them and turns it into a `Collective`; none is ever called on real tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.graph.cost import value_bytes


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """The sum of all ranks' tensors along an axis."""
    return torch.empty_like(x)


def all_gather(x: Tensor, axis: str, dim: int, extents: Sequence[int]) -> Tensor:
    """All ranks' shards joined on `dim`; `extents` are the extents of the shards."""
    shape = list(x.shape)
    shape[dim] = sum(extents)
    return x.new_empty(shape)


def reduce_scatter(x: Tensor, axis: str, dim: int, extents: Sequence[int], own: int) -> Tensor:
    """This rank's shard, of extent `own` on `dim`, of the sum of all ranks' tensors."""
    shape = list(x.shape)
    shape[dim] = own
    return x.new_empty(shape)


def halo(x: Tensor, axis: str, dim: int, before: int, after: int, fill: float) -> Tensor:
    """The shard with `before` rows of the rank before it and `after` of the next one; `fill` at the two ends."""
    shape = list(x.shape)
    shape[dim] += before + after
    return x.new_empty(shape)


def halo_add(x: Tensor, axis: str, dim: int, before: int, after: int) -> Tensor:
    """The transpose of `halo`: the outer rows are added to the ranks they belong to, and dropped at the two ends."""
    shape = list(x.shape)
    shape[dim] -= before + after
    return x.new_empty(shape)


COLLECTIVES = (all_reduce, all_gather, reduce_scatter, halo, halo_add)


def take_shard(x: Tensor, dim: int, extent: int, per_unit: int, offset: int) -> Tensor:
    """This rank's shard of a replicated tensor: not communication, but it needs the rank's offset in units."""
    return x.narrow(dim, offset * per_unit, extent).contiguous()


def split_dim(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """`dim` as two dims."""
    return x.reshape([*x.shape[:dim], outer, inner, *x.shape[dim + 1 :]])


def merge_dims(x: Tensor, dim: int) -> Tensor:
    """`dim` and the one after it as one."""
    return x.reshape([*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]])


def bytes_sent(op: str, source: torch.fx.Node, node: torch.fx.Node, fields: Mapping[Any, Any]) -> int:
    """Bytes of the whole that is gathered or summed; of a halo, the rows that change hands."""
    whole = value_bytes((source if op in ("reduce_scatter", "halo_add") else node).meta["val"])
    if op in ("halo", "halo_add"):
        extents = (source if op == "halo_add" else node).meta["val"].shape
        return int(whole * (fields["before"] + fields["after"]) // max(int(extents[fields["dim"]]), 1))
    return whole
