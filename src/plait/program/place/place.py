"""Placements of everything in a graph, on every axis of a plan's mesh.

In: a graph, a plan whose choices are made, the samples of each rank. Out: `Placements`, one for each axis but `pipe`.
"""

import torch

from plait.graph.graph import Graph
from plait.plan.plan import DATA, PIPE, Plan
from plait.program.place.pins import input_placements, pinned_strategies
from plait.program.place.placement import AxisShares, Placement, Shard, Strategy
from plait.program.place.propagate import Placements, propagate


def place(graph: Graph, plan: Plan, units: tuple[int, ...]) -> tuple[Placements, ...]:
    """Placements of everything on every axis of the mesh; `units` are the samples of each rank of `data`."""
    found: dict[str, Placements] = {}
    axes = [entry for entry in plan.mesh.axes if entry[0] != PIPE]
    for name, size in sorted(axes, key=lambda axis: axis[0] != DATA):
        if name == DATA:
            found[name] = placed_on_data(graph, units)
            continue
        axis = AxisShares(name=name, units=(1,) * size)
        inputs: dict[str, Placement] = {}
        pins: dict[torch.fx.Node, Strategy] = {}
        if (said := plan.placements_of(name)) is not None:
            inputs = input_placements(graph, axis, said)
            pins = pinned_strategies(graph, axis, said)
        found[name] = propagate(graph, axis, inputs, pins=pins, others=tuple(found.values()))
    return tuple(found[name] for name, _ in axes)


def placed_on_data(graph: Graph, units: tuple[int, ...]) -> Placements:
    """Placements where `data` cuts the samples in `units`: chosen once for a graph, whatever other axes cut."""
    key = (DATA, units)
    if key not in graph.known:
        entries = zip(graph.inputs_of("batch"), graph.batch.has_samples, strict=True)
        inputs: dict[str, Placement] = {entry.node: Shard(0) for entry, counts in entries if counts}
        graph.known[key] = propagate(graph, AxisShares(name=DATA, units=units), inputs)
    known: Placements = graph.known[key]
    return known
