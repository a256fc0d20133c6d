"""Ops that are told a shape: the local one takes its place."""

import torch

from plait.program.local.lowering import Local, Site, lower
from plait.program.place.rules.base import aten


@lower(aten.view)
def view(site: Site) -> Local:
    """A shard may lie in memory otherwise than the whole, after a conversion say: it is copied where it must be."""
    x, shape = site.args[0], site.shape()
    if not _can_view(x.meta["val"], shape):
        x = site.emit(aten.clone.default, x, memory_format=torch.contiguous_format)
    return site.same(x, shape, *site.args[2:])


def _can_view(x: torch.Tensor, shape: list[int]) -> bool:
    if x.is_contiguous():
        return True
    try:
        x.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


@lower(aten._unsafe_view, aten.reshape, aten._reshape_copy, aten.expand)
def size_second(site: Site) -> Local:
    return site.same(site.args[0], site.shape(), *site.args[2:])


@lower(aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full, empty=True)
def made_like(site: Site) -> Local:
    """What is made does not depend on the share of what it is made like."""
    return site.same(site.args[0], site.shape(), *site.args[2:])


@lower(aten.zeros, aten.ones, aten.full, aten.empty)
def size_first(site: Site) -> Local:
    return site.same(site.shape(), *site.args[1:])


@lower(
    aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward, aten.upsample_linear1d_backward,
    aten.upsample_trilinear3d_backward,
)  # fmt: skip
def upsample_backward(site: Site) -> Local:
    return site.same(*site.args[:2], site.shape(), *site.args[3:])
