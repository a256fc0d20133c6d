"""Attention of a rank that has some of the queries of every sequence, and all keys and values."""

from typing import Any

from plait.program.local import spatial as local
from plait.program.local.lowering import Local, Site, lower
from plait.program.place.placement import Shard
from plait.program.place.rules.base import ours


@lower(ours.attention)
def attention(site: Site) -> Local:
    q, k, v, mask, causal, scale = site.args
    return site.same(q, k, v, *_visible(site, q, k, mask, causal), scale)


@lower(ours.attention_backward)
def attention_backward(site: Site) -> Local:
    *saved, mask, causal, scale = site.args
    _, q, k, *_ = saved
    return site.same(*saved, *_visible(site, q, k, mask, causal), scale)


def _visible(site: Site, q: Any, k: Any, mask: Any, causal: bool) -> tuple[Any, bool]:
    """The mask, and whether the kernel is told that queries see no later key: it counts from the first query it has."""
    cut = [
        index
        for index, (axis, strategy) in enumerate(zip(site.axes, site.strategies, strict=True))
        if axis.size > 1 and strategy.outputs[0] == Shard(2)
    ]
    if not causal or not cut:
        return mask, causal
    assert mask is None, "causal attention has no other mask"
    return site.emit(local.visible_keys, q, k.meta["val"].shape[2], site.offset(cut[0])), False
