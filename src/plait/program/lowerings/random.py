"""Random numbers: the piece of the unsharded tensor that a rank holds."""

from typing import Any

from plait.program.lowering import Local, Site, lower
from plait.program.placement import Shard
from plait.program.rules.base import ours


@lower(ours.bernoulli, ours.uniform, ours.normal, ours.randint)
def random(site: Site) -> Local:
    """The piece of the unsharded tensor that this rank holds; where samples are cut, its start comes with the key."""
    full = [int(extent) for extent in site.node.meta["val"].shape]
    extra: dict[str, Any] = {"full": full, "start": [0] * len(full)}
    for axis, strategy in zip(site.axes, site.strategies, strict=True):
        placement = strategy.outputs[0]
        if isinstance(placement, Shard):
            extra["batch_dim"] = placement.dim
            extra["rows_per_sample"] = full[placement.dim] // max(axis.total, 1)
    key, op, _, *rest = site.args
    return site.same(key, op, site.shape(), *rest, **extra)
