"""Group gradients into buckets, in the order in which the backward produces them.

In: a graph, how its gradients leave it, where parameters are held, a plan. Out: buckets, the same on every rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from plait.graph.graph import Graph
from plait.plan.plan import PIPE, Plan
from plait.program.layout import Layout
from plait.program.local.local_graph import LocalGraph
from plait.program.place.placement import AxisShares, Partial, Placement
from plait.program.program import Bucket

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that communication starts early."""

STAGE_BYTES = 1 << 20
"""Gradients of a stage that need no sum are added up after every so many: each micro-batch makes them anew, beside the
activations of all that are in flight."""

Ends = Sequence[Mapping[str, Placement]]
"""How what leaves a graph is placed, per axis."""


SCALARS = ("total", "weight")
"""What is summed over ranks beside gradients."""


def scalar(name: str) -> str:
    """What `sums_of` calls a scalar: no parameter can be called so, and some are called `weight`."""
    return f"..{name}"


def sums_of(graph: Graph, ends: Ends, axes: Sequence[AxisShares]) -> dict[str, tuple[str, ...]]:
    """For each parameter's gradient, and each scalar: the axes over which it is still to be summed."""
    ended = {scalar(name): name for name in SCALARS} | {name: f"gradient:{name}" for name in graph.gradients}
    return {
        name: tuple(
            axis.name
            for axis, end in zip(axes, ends, strict=True)
            if isinstance(end[key], Partial) and axis.size > 1
        )
        for name, key in ended.items()
    }


def make_buckets(
    graph: Graph,
    sums: Mapping[str, tuple[str, ...]],
    layout: Layout,
    plan: Plan,
    home: Mapping[str, object] | None = None,
    coordinate: int = 0,
    part_bytes: float | None = None,
) -> tuple[Bucket, ...]:
    """Buckets of summed gradients first, in order of production; then those that need no sum; then scalars.

    Of a pipeline: those of the rank at `coordinate`; `home` are the stages of each parameter: others share no bucket.
    `part_bytes`: of gradients that need no sum, so many share a bucket; None: all.
    """
    nodes = graph.nodes()
    order = {name: index for index, name in enumerate(nodes)}
    if layout.groups:
        return _with_scalars(_of_groups(graph, sums, layout, coordinate), graph, sums, plan)
    here = [n for n in graph.gradients if not layout.owners or coordinate in layout.owners[n]]
    names = sorted(here, key=lambda name: order[graph.gradients[name]])
    keys = {
        name: (nodes[graph.gradients[name]].meta["val"].dtype, sums[name], (home or {}).get(name))
        for name in names
    }
    coordinates = layout.coordinates(0)
    limit = plan.sync.bucket_mib * 2**20
    buckets: list[list[str]] = []
    room: dict[object, float] = {}
    open_: dict[object, int] = {}
    for name in (n for n in names if sums[n]):
        value, key = nodes[graph.gradients[name]].meta["val"], keys[name]
        size = torch.Size(layout.local_shape(name, coordinates)).numel() * value.element_size()
        if room.get(key, 0.0) <= 0:  # over rather than under: a bias joins its weight
            open_[key] = len(buckets)
            room[key] = limit if buckets else min(limit, FIRST_BUCKET_BYTES)
            buckets.append([])
        buckets[open_[key]].append(name)
        room[key] -= size
    whole: dict[object, list[str]] = {}
    part_bytes = STAGE_BYTES if home is not None else part_bytes
    for name in (n for n in names if not sums[n]):
        key = keys[name]
        if part_bytes is not None and room.get(key, 0.0) <= 0:
            open_[key], room[key] = len(whole), part_bytes
        whole.setdefault((key[2], open_.get(key)), []).append(name)
        room[key] = room.get(key, 0.0) - nodes[graph.gradients[name]].meta["val"].nbytes
    made = []
    for group in (*buckets, *whole.values()):
        values = [nodes[graph.gradients[name]].meta["val"] for name in group]
        owners = layout.owners.get(group[0], ())
        made.append(
            Bucket(
                parameters=tuple(group),
                shapes=tuple(layout.local_shape(name, coordinates) for name in group),
                dtype=values[0].dtype,
                axis="+".join(sums[group[0]]) or None,
                tied=owners if len(owners) > 1 else (),
            )
        )
    return _with_scalars(made, graph, sums, plan)


def _of_groups(
    graph: Graph, sums: Mapping[str, tuple[str, ...]], layout: Layout, coordinate: int
) -> list[Bucket]:
    """Where parameters are held in flat groups: a bucket of the same shape for each."""
    nodes = graph.nodes()
    return [
        Bucket(
            parameters=group.parameters,
            shapes=group.shapes,
            dtype=nodes[graph.gradients[group.parameters[0]]].meta["val"].dtype,
            axis="+".join(sums[group.parameters[0]]),
            tied=group.owners if len(group.owners) > 1 else (),
            group=group,
        )
        for group in layout.groups
        if group.trained
        and group.parameters[0] in graph.gradients  # by this graph
        and (not layout.owners or coordinate in group.owners)
    ]


def _with_scalars(
    buckets: list[Bucket], graph: Graph, sums: Mapping[str, tuple[str, ...]], plan: Plan
) -> tuple[Bucket, ...]:
    """Scalars that must be summed travel with the last bucket that is summed alike: no message of their own.

    Beside compressed gradients they have one: they are never compressed. So they have from thread to thread, where the
    loss is gathered before the backward.
    """
    nodes = graph.nodes()
    late = graph.static_weight is None and not graph.weight_is_early
    wanted = [name for name in ("total", *(("weight",) if late else ())) if sums[scalar(name)]]
    dtype = nodes[graph.total].meta["val"].dtype
    for axis in dict.fromkeys("+".join(sums[scalar(name)]) for name in wanted):
        names = tuple(name for name in wanted if "+".join(sums[scalar(name)]) == axis)
        for index in reversed(range(len(buckets))):
            bucket = buckets[index]
            alike = bucket.axis == axis and bucket.dtype == dtype and PIPE not in axis
            alike = alike and not plan.agreement.threads
            if alike and bucket.group is None and bucket.parameters and plan.sync.compress == "none":
                buckets[index] = replace(bucket, scalars=names)
                break
        else:
            buckets.append(Bucket(parameters=(), shapes=(), dtype=dtype, axis=axis, scalars=names))
    return tuple(buckets)


def bucket_reads(graph: Graph, local: LocalGraph, buckets: Sequence[Bucket], index: int) -> list[str]:
    """Local nodes that go into a bucket: gradients, its scalars, and beside the last one scalars that none carries."""
    bucket = buckets[index]
    scalars = {"total": local.total, "weight": local.weight}
    carried = list(bucket.scalars)
    if index == len(buckets) - 1:
        known = {name for other in buckets for name in other.scalars}
        late = graph.static_weight is None and not graph.weight_is_early
        carried += [name for name in ("total", *(("weight",) if late else ())) if name not in known]
    return [*(local.gradients[name] for name in bucket.parameters), *(scalars[name] for name in carried)]
