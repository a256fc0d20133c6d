"""Group gradients into buckets, in the order in which the backward produces them.

In: a graph, its placements, a plan. Out: buckets that are the same on every rank.
"""

import torch

from plait.graph.graph import Graph
from plait.plan.plan import DATA, Plan
from plait.program.placement import Partial
from plait.program.program import Bucket
from plait.program.propagate import Placements

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that communication starts early."""


def make_buckets(graph: Graph, placed: Placements, plan: Plan) -> tuple[Bucket, ...]:
    """Buckets of summed gradients first, in order of production; then one of those that need no sum, by dtype."""
    nodes = graph.nodes()
    order = {name: index for index, name in enumerate(nodes)}
    names = sorted(graph.gradients, key=lambda name: order[graph.gradients[name]])
    several = plan.mesh.size > 1
    summed = [n for n in names if several and isinstance(placed.of(nodes[graph.gradients[n]]), Partial)]
    whole = [n for n in names if n not in set(summed)]
    limit = plan.sync.bucket_mib * 2**20
    buckets: list[list[str]] = []
    room = 0.0
    previous: torch.dtype | None = None
    for name in summed:
        value = nodes[graph.gradients[name]].meta["val"]
        size = value.numel() * value.element_size()
        if (
            not buckets or value.dtype != previous or room <= 0
        ):  # over rather than under: a bias joins its weight
            buckets.append([])
            room = min(limit, FIRST_BUCKET_BYTES) if len(buckets) == 1 else limit
        buckets[-1].append(name)
        room -= size
        previous = value.dtype
    made = [_bucket(graph, nodes, group, DATA) for group in buckets]
    if whole:
        made.append(_bucket(graph, nodes, whole, None))
    return _with_scalars(tuple(made), graph, placed, several)


def _bucket(graph: Graph, nodes: dict[str, torch.fx.Node], names: list[str], axis: str | None) -> Bucket:
    values = [nodes[graph.gradients[name]].meta["val"] for name in names]
    return Bucket(
        parameters=tuple(names),
        shapes=tuple(tuple(value.shape) for value in values),
        dtype=values[0].dtype,
        axis=axis,
    )


def _with_scalars(
    buckets: tuple[Bucket, ...], graph: Graph, placed: Placements, several: bool
) -> tuple[Bucket, ...]:
    """Scalars that must be summed travel at the end of the last summed bucket: no message of their own."""
    nodes = graph.nodes()
    wanted = []
    if several and isinstance(placed.of(nodes[graph.total]), Partial):
        wanted.append("total")
    late = graph.static_weight is None and not graph.weight_is_early
    if several and late and isinstance(placed.of(nodes[graph.weight]), Partial):
        wanted.append("weight")
    if not wanted:
        return buckets
    total_dtype = nodes[graph.total].meta["val"].dtype
    for index in reversed(range(len(buckets))):
        bucket = buckets[index]
        if bucket.axis is not None and bucket.dtype == total_dtype:
            changed = Bucket(
                parameters=bucket.parameters,
                shapes=bucket.shapes,
                dtype=bucket.dtype,
                axis=bucket.axis,
                scalars=tuple(wanted),
            )
            return (*buckets[:index], changed, *buckets[index + 1 :])
    extra = Bucket(parameters=(), shapes=(), dtype=total_dtype, axis=DATA, scalars=tuple(wanted))
    return (*buckets, extra)
