"""What a plan says about the tensors of a graph, found and checked.

In: a graph, an axis, the plan's placements along it. Out: placements of the graph's inputs and strategies of its ops.
Everything that cannot be had is refused here, before any process starts, with the numbers and what would be possible.
"""

from fnmatch import fnmatchcase

from torch import fx

from plait.errors import PlanError
from plait.graph.graph import Graph, Input
from plait.plan.placements import AxisPlacements, Entries
from plait.program.place.op_keys import exact_keys, op_keys, pins_of
from plait.program.place.placement import (
    AxisShares,
    Partial,
    Placement,
    Shard,
    Strategy,
    parse_placement,
)
from plait.program.place.propagate import candidates
from plait.program.place.rules import Op


def input_placements(graph: Graph, axis: AxisShares, said: AxisPlacements) -> dict[str, Placement]:
    """Placements of parameters and of the batch, by placeholder."""
    nodes = graph.nodes()
    found: dict[str, Placement] = {}
    entries = zip(graph.inputs_of("batch"), graph.batch.has_samples, strict=True)
    samples = {entry.node for entry, counts in entries if counts}
    _check_patterns(
        said.parameters, [entry.name for entry in graph.inputs_of("parameter")], axis, "parameter"
    )
    _check_patterns(
        said.batch, [entry.name for entry in graph.inputs_of("batch")], axis, "tensor of the batch"
    )
    for entry in (*graph.inputs_of("parameter"), *graph.inputs_of("batch")):
        kind = said.parameter if entry.kind == "parameter" else said.batch_tensor
        text = kind(entry.name)
        if text is not None:
            placement = parse_placement(text)
            _check_kind(entry, placement, axis, samples)
            _check_shape(entry, nodes[entry.node], placement, axis)
            found[entry.node] = placement
    return found


def pinned_strategies(graph: Graph, axis: AxisShares, said: AxisPlacements) -> dict[fx.Node, Strategy]:
    """Strategies of ops, by node."""
    if not said.ops:
        return {}
    keys = exact_keys(graph)
    _check_patterns(said.ops, [*keys.values(), *op_keys(graph).values()], axis, "op")
    found = pins_of(graph, said.ops)
    for node, strategy in found.items():
        _check_strategy(node, keys[node], strategy, axis)
    return found


def _check_patterns(entries: Entries, names: list[str], axis: AxisShares, what: str) -> None:
    known = set(names)
    for pattern, _ in entries:
        if pattern not in known and not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                f"placements.{axis.name}: no {what} is called {pattern!r}.",
                fix=f"use one of {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}.",
            )


def _check_kind(entry: Input, placement: Placement, axis: AxisShares, samples: set[str]) -> None:
    if isinstance(placement, Partial):
        raise PlanError(
            f"placements.{axis.name}: {entry.name} is given, so it cannot be a sum that is still to be made.",
            fix="use R or S(dim).",
        )
    if entry.node in samples and isinstance(placement, Shard) and placement.dim == 0:
        raise PlanError(
            f"placements.{axis.name}: dim 0 of {entry.name} holds the samples, which axis data cuts.",
            fix=f"use data={axis.size} in the mesh, or cut another dim.",
        )


def _check_shape(entry: Input, node: fx.Node, placement: Placement, axis: AxisShares) -> None:
    if not isinstance(placement, Shard):
        return
    shape = tuple(node.meta["val"].shape)
    if placement.dim >= len(shape):
        raise PlanError(
            f"{entry.name} has {len(shape)} dims; {placement} would cut dim {placement.dim}.",
            fix=f"use a dim below {len(shape)}.",
        )
    extent = shape[placement.dim]
    if extent % placement.outer or not axis.divides(extent // placement.outer):
        parts = f" in {placement.outer} parts" if placement.outer > 1 else ""
        raise PlanError(
            f"{entry.name}: dim {placement.dim} of {list(shape)}{parts} does not divide by {axis.name}={axis.size}.",
            fix=f"choose a size of {axis.name} that divides {extent // placement.outer}, or another dim"
            + (f"; or let `collate` pad to a multiple of {axis.size}." if entry.kind == "batch" else "."),
        )


def _check_strategy(node: fx.Node, key: str, strategy: Strategy, axis: AxisShares) -> None:
    outers = {p.outer for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)}
    possible = candidates(Op(node, axis, frozenset(outers - {1})))
    if strategy not in possible:
        listed = "; ".join(dict.fromkeys(map(str, possible)))
        source = node.meta.get("source", "")
        raise PlanError(
            f"placements.{axis.name}.ops: {key} ({node.target}{f', {source}' if source else ''}) "
            f"cannot run as {strategy}.",
            fix=f"it can run as {listed}.",
        )
