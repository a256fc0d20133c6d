"""Random numbers: the shard of the unsharded tensor that a rank holds."""

import operator
from typing import Any

from plait.plan.plan import DATA
from plait.program.local.lowering import Local, Site, lower
from plait.program.place.placement import Shard
from plait.program.place.rules.base import ours


@lower(ours.bernoulli, ours.uniform, ours.normal, ours.randint)
def random(site: Site) -> Local:
    """Where samples are cut, the start of the shard comes with the key; on other axes, it is the rank's offset."""
    full = [int(extent) for extent in site.node.meta["val"].shape]
    start: list[Any] = [0] * len(full)
    extra: dict[str, Any] = {"full": full, "start": start}
    for index, (axis, strategy) in enumerate(zip(site.axes, site.strategies, strict=True)):
        placement = strategy.outputs[0]
        if not isinstance(placement, Shard):
            continue
        assert placement.outer == 1, f"{site.node} is drawn in shards of outer parts"
        per_unit = full[placement.dim] // max(axis.total, 1)
        if axis.name == DATA:
            extra |= {"batch_dim": placement.dim, "rows_per_sample": per_unit}
        elif axis.size > 1:
            start[placement.dim] = site.emit(operator.mul, site.offset(index), per_unit)
    key, op, _, *rest = site.args
    return site.same(key, op, site.shape(), *rest, **extra)
