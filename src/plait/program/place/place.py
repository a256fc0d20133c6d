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
        axis = AxisShares(name=name, units=units if name == DATA else (1,) * size)
        inputs: dict[str, Placement] = {}
        pins: dict[torch.fx.Node, Strategy] = {}
        if name == DATA:
            entries = zip(graph.inputs_of("batch"), graph.batch.has_samples, strict=True)
            inputs = {entry.node: Shard(0) for entry, counts in entries if counts}
        elif (said := plan.placements_of(name)) is not None:
            inputs = input_placements(graph, axis, said)
            pins = pinned_strategies(graph, axis, said)
        found[name] = propagate(graph, axis, inputs, pins=pins, others=tuple(found.values()))
    return tuple(found[name] for name, _ in axes)
