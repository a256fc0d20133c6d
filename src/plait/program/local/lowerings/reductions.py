"""Reductions over a dim that ranks hold shards of: reduce the shard, exchange the results, reduce these."""

from typing import Any

import torch
from torch import fx

from plait.program.local.communicate import all_gather
from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings.own_shard import is_empty_beside
from plait.program.place.placement import Replicate, Shard
from plait.program.place.rules.base import aten

_AGAIN: dict[Any, tuple[Any, bool]] = {
    aten.amax: (aten.amax.default, True), aten.amin: (aten.amin.default, True), aten.max: (aten.amax.default, True),
    aten.min: (aten.amin.default, True), aten.any: (aten.any.dim, False), aten.all: (aten.all.dim, False),
    aten.prod: (aten.prod.dim_int, False), aten.logsumexp: (aten.logsumexp.default, True),
}  # fmt: skip
"""What reduces the results of the ranks over a dim, and whether it takes a list of dims."""


@lower(*_AGAIN, aten.linalg_vector_norm, empty=True)
def reduction(site: Site) -> Local:
    axes = meeting(site)
    if is_empty_beside(site, axes):
        return site.nothing()
    value = _identity(site) if site.is_empty() else site.same(*site.args)
    for index in axes:
        axis = site.axes[index]
        rows = site.emit(aten.unsqueeze.default, value, 0)
        rows = site.emit(all_gather, rows, axis.name, 0, [1] * axis.size)
        packet = site.node.target.overloadpacket  # type: ignore[union-attr]
        if packet is aten.linalg_vector_norm:
            order = site.args[1] if len(site.args) > 1 else 2
            value = site.emit(aten.linalg_vector_norm.default, rows, order, [0])
        else:
            again, takes_list = _AGAIN[packet]
            value = site.emit(again, rows, [0] if takes_list else 0)
    return value


def meeting(site: Site) -> list[int]:
    """The axes whose ranks have shards of what is reduced: they come in cut and go out whole."""
    pairs = enumerate(zip(site.axes, site.strategies, strict=True))
    return [
        i
        for i, (axis, s) in pairs
        if axis.size > 1 and isinstance(s.inputs[0], Shard) and isinstance(s.outputs[0], Replicate)
    ]


def _identity(site: Site) -> fx.Node:
    """What changes no result."""
    value = site.node.meta["val"]
    packet = site.node.target.overloadpacket  # type: ignore[union-attr]
    if packet in (aten.any, aten.all):
        number: float = packet is aten.all
    elif packet is aten.prod:
        number = 1
    elif packet is aten.linalg_vector_norm:
        number = 0
    else:
        sign = 1 if packet in (aten.amin, aten.min) else -1
        limits = torch.iinfo(value.dtype) if not value.dtype.is_floating_point else None
        number = sign * torch.inf if limits is None else (limits.max if sign > 0 else limits.min)
    return site.emit(aten.new_full.default, site.args[0], site.shape(), number, dtype=value.dtype)
