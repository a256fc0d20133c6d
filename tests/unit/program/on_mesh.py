"""Run a captured graph on the ranks of a mesh in one process, and put its outputs together again.

In: a graph, the placements chosen on each axis, real tensors for everything that enters. Out: the total, the weight
and the gradients as all ranks together computed them, and the communication that one rank asked for.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from tests.unit.program.one_op import distribute
from torch import Tensor, fx

from plait.graph.graph import Graph
from plait.plan.plan import DATA
from plait.program.local.communicate import COLLECTIVES, all_gather, all_reduce
from plait.program.local.localize import localize
from plait.program.place.placement import AxisShares, Partial, Placement, R, Shard
from plait.program.place.propagate import Placements, propagate

Rank = Generator[tuple[Any, ...], Tensor, list[Any]]
Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Ran:
    """What the ranks computed together."""

    outputs: dict[str, Tensor]
    """`total`, `weight`, and gradients by parameter name."""
    communication: Counter[tuple[str, str, str]]
    """How often the first rank did what: (phase, collective, axis)."""


def real_inputs(graph: Graph, batch: Any, seed: int = 0) -> dict[str, Tensor]:
    """Numbers for everything that enters a graph beside a batch."""
    generator = torch.Generator().manual_seed(seed)
    tensors = iter(graph.batch.tensors(batch))
    found = {}
    for entry in graph.inputs:
        like = graph.nodes()[entry.node].meta["val"]
        if entry.kind == "batch":
            given = next(tensors)
            found[entry.node] = given.to(like.dtype)
        elif entry.kind == "key":
            found[entry.node] = torch.tensor([3, 5, 0])
        elif entry.kind == "tangent":
            found[entry.node] = torch.tensor(0.5, dtype=like.dtype)
        else:
            spread = torch.rand(like.shape, generator=generator, dtype=torch.float64)
            found[entry.node] = (spread - 0.5 * (entry.kind == "parameter")).to(like.dtype)
    return found


def run_whole(graph: Graph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the graph gives when nothing is cut; samples are drawn as on `data`."""
    axis = AxisShares(name=DATA, units=(graph.num_samples,))
    return run_on_mesh(graph, [place(graph, axis, {})], inputs).outputs


def place(
    graph: Graph, axis: AxisShares, parameters: Mapping[str, Placement], others: Sequence[Placements] = ()
) -> Placements:
    """Placements of everything, given those of parameters by a part of their names."""
    placed: dict[str, Placement] = {}
    if axis.name == DATA:
        entries = zip(graph.inputs_of("batch"), graph.batch.has_samples, strict=True)
        placed = {entry.node: Shard(0) for entry, counts in entries if counts}
    for entry in graph.inputs_of("parameter"):
        placed[entry.node] = next((p for part, p in parameters.items() if part in entry.name), R)
    return propagate(graph, axis, placed, others=others)


def run_on_mesh(graph: Graph, chosen: Sequence[Placements], inputs: Mapping[str, Tensor]) -> Ran:
    """All ranks of the mesh whose axes are those of `chosen`."""
    axes = [placements.axis for placements in chosen]
    ranks: dict[Coordinates, Rank] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    shares = {entry.node: _shares(graph, entry.node, entry.kind, chosen, inputs) for entry in graph.inputs}
    for coordinates in product(*(range(axis.size) for axis in axes)):
        local = localize(graph, chosen, coordinates, local_batch_norm=False)
        if not any(coordinates):
            first = local
            for node in local.graph.nodes:
                if node.target in COLLECTIVES:
                    counts[(node.meta["phase"], node.target.__name__, node.args[1])] += 1
        given: dict[str, Any] = {name: parts[coordinates] for name, parts in shares.items()}
        for axis, coordinate in zip(axes, coordinates, strict=True):
            given[f"offset_{axis.name}"] = axis.offset(coordinate)
        ranks[coordinates] = _run(local.graph, given)
    results = _together(ranks, [axis.name for axis in axes])
    ends = {
        "total": first.total_placement,
        "weight": first.weight_placement,
        **{name: first.gradient_placements[name] for name in first.gradients},
    }
    outputs = {}
    for index, (name, placements) in enumerate(ends.items()):
        parts = {coordinates: result[index] for coordinates, result in results.items()}
        outputs[name] = _joined(parts, placements)
    return Ran(outputs, counts)


def _shares(
    graph: Graph, node: str, kind: str, chosen: Sequence[Placements], inputs: Mapping[str, Tensor]
) -> dict[Coordinates, Tensor]:
    """What each rank is given; a batch is cut by samples alone."""
    parts: dict[Coordinates, Tensor] = {(): inputs[node]}
    for placements in chosen:
        axis = placements.axis
        placement = placements.of(graph.nodes()[node]) if axis.name == DATA or kind != "batch" else R
        cut = {}
        for coordinates, part in parts.items():
            pieces = distribute(part, placement, axis, torch.Generator())
            for rank, piece in enumerate(pieces):
                cut[(*coordinates, rank)] = piece
                if kind == "key" and axis.name == DATA:
                    cut[(*coordinates, rank)] = torch.cat([part[:2], part.new_tensor([axis.offset(rank)])])
        parts = cut
    return parts


def _joined(parts: dict[Coordinates, Tensor], placements: Sequence[Placement]) -> Tensor:
    """One tensor from those of all ranks, axis by axis."""
    for placement in reversed(placements):
        groups: dict[Coordinates, list[Tensor]] = {}
        for coordinates, part in parts.items():
            groups.setdefault(coordinates[:-1], []).append(part)
        if isinstance(placement, Partial):
            parts = {key: sum(group[1:], start=group[0]) for key, group in groups.items()}
        elif isinstance(placement, Shard):
            parts = {key: _concatenated(group, placement) for key, group in groups.items()}
        else:
            for group in groups.values():
                for other in group[1:]:
                    torch.testing.assert_close(other, group[0])
            parts = {key: group[0] for key, group in groups.items()}
    return parts[()]


def _concatenated(group: list[Tensor], placement: Shard) -> Tensor:
    columns = zip(*(part.chunk(placement.outer, placement.dim) for part in group), strict=True)
    return torch.cat([piece for column in columns for piece in column], placement.dim)


def _run(graph: fx.Graph, given: dict[str, Any]) -> Rank:
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "get_attr":
            values[node] = node.meta["constant"]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            collective = node.target in COLLECTIVES
            values[node] = (yield (node.target, *args)) if collective else node.target(*args, **kwargs)
        elif node.op == "output":
            return list(fx.map_arg(node.args[0], values.__getitem__))
    raise AssertionError("a graph without an output")


@torch.no_grad()
def _together(ranks: dict[Coordinates, Rank], axes: Sequence[str]) -> dict[Coordinates, list[Any]]:
    """Advance every rank to its next collective; run a collective when all ranks of its group ask for it."""
    asked: dict[Coordinates, tuple[Any, ...]] = {}
    done: dict[Coordinates, list[Any]] = {}
    ready: dict[Coordinates, Tensor | None] = dict.fromkeys(ranks)
    while len(done) < len(ranks):
        assert ready, "ranks wait for each other"
        for key, reply in ready.items():
            try:
                asked[key] = ranks[key].send(reply)  # type: ignore[arg-type]
            except StopIteration as stop:
                done[key] = stop.value
        ready = {}
        for key, entry in list(asked.items()):
            kept = [index for index, axis in enumerate(axes) if axis not in entry[2].split("+")]
            group = [other for other in ranks if all(other[index] == key[index] for index in kept)]
            if key == group[0] and all(other in asked and asked[other][2] == entry[2] for other in group):
                ready |= dict(zip(group, _collective([asked.pop(other) for other in group]), strict=True))
    return done


def _collective(asked: list[tuple[Any, ...]]) -> list[Tensor]:
    assert len({(entry[0], *map(str, entry[2:5])) for entry in asked}) == 1, (
        "ranks start different collectives"
    )
    tensors, target = [entry[1] for entry in asked], asked[0][0]
    if target is all_gather:
        assert [t.shape[asked[0][3]] for t in tensors] == list(asked[0][4]), (tensors[0].shape, asked[0][2:])
        return [torch.cat(tensors, asked[0][3])] * len(tensors)
    total = sum(tensors[1:], start=tensors[0])
    if target is all_reduce:
        return [total] * len(tensors)
    return list(total.split(list(asked[0][4]), asked[0][3]))
