"""Compile (graphs, plan) into a Program: what every rank does in one training step.

In: one captured graph per micro-batch size (or the names of an uncapturable model's parameters), a resolved plan, the
sizes of the micro-batches. Out: a checked `Program`. It is the only place that knows both a plan and a graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from plait.graph.graph import Graph
from plait.job.order import shares as equal_shares
from plait.plan.plan import DATA, Plan
from plait.program.buckets import make_buckets
from plait.program.build import StepBuilder
from plait.program.check import check_program
from plait.program.cut import Piece, cut
from plait.program.localize import LocalGraph, localize
from plait.program.placement import AxisShares, Placement, Shard
from plait.program.program import Bucket, Program, RankProgram
from plait.program.propagate import Placements, propagate


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the job contributes to a program beside its graph."""

    clip_norm: float | None
    batch_norm: str
    device: torch.device


def compile_program(
    graphs: Mapping[int, Graph],
    plan: Plan,
    micro_batches: Sequence[int],
    settings: Settings,
    shares: Sequence[tuple[int, ...]] | None = None,
) -> Program:
    """Compile one step of `micro_batches`; `shares` are the samples of each rank, nearly equal where not given."""
    ranks = plan.mesh.size
    given = (
        tuple(shares) if shares is not None else tuple(equal_shares(size, ranks) for size in micro_batches)
    )
    chosen = {
        (size, units): _place(graphs[size], units) for size, units in zip(micro_batches, given, strict=True)
    }
    first = graphs[micro_batches[0]]
    placed = chosen[(micro_batches[0], given[0])]
    buckets = make_buckets(first, placed, plan)
    classes: list[RankProgram] = []
    index_of: dict[tuple[int, ...], int] = {}
    members = []
    for rank in range(ranks):
        own = tuple(units[rank] for units in given)
        if own not in index_of:
            index_of[own] = len(classes)
            classes.append(_compile_rank(graphs, chosen, plan, micro_batches, given, rank, buckets, settings))
        members.append(index_of[own])
    weights = [graphs[size].static_weight for size in micro_batches]
    program = Program(
        plan=plan,
        micro_batches=tuple(micro_batches),
        shares=given,
        buckets=buckets,
        classes=tuple(classes),
        members=tuple(members),
        gathered=placed.gathered,
        notices=first.notices,
        total_weight=None if None in weights else float(sum(w for w in weights if w is not None)),
    )
    check_program(program)
    return program


def _place(graph: Graph, units: tuple[int, ...]) -> Placements:
    axis = AxisShares(name=DATA, units=units)
    inputs: dict[str, Placement] = {
        entry.node: Shard(0)
        for entry, counts in zip(graph.inputs_of("batch"), graph.batch.has_samples, strict=True)
        if counts
    }
    return propagate(graph, axis, inputs)


def _compile_rank(
    graphs: Mapping[int, Graph],
    chosen: Mapping[tuple[int, tuple[int, ...]], Placements],
    plan: Plan,
    micro_batches: Sequence[int],
    shares: Sequence[tuple[int, ...]],
    rank: int,
    buckets: tuple[Bucket, ...],
    settings: Settings,
) -> RankProgram:
    builder = StepBuilder(plan, buckets, settings.clip_norm, settings.device)
    locals_: dict[tuple[int, tuple[int, ...]], tuple[LocalGraph, list[Piece], list[Piece]]] = {}
    for number, (size, units) in enumerate(zip(micro_batches, shares, strict=True)):
        key = (size, units)
        if key not in locals_:
            graph = graphs[size]
            first = (micro_batches[0], shares[0])
            local = localize(
                graph,
                [chosen[key]],
                plan.mesh.coordinates(rank),
                local_batch_norm=settings.batch_norm == "local",
                like=[(graphs[first[0]], chosen[first])],
            )
            prefix = f"{len(locals_)}."
            locals_[key] = (local, *_pieces(graph, local, buckets, prefix, settings.device))
        builder.add_micro_batch(graphs[size], *locals_[key], number)
    return builder.finish()


def _pieces(
    graph: Graph, local: LocalGraph, buckets: tuple[Bucket, ...], prefix: str, device: torch.device
) -> tuple[list[Piece], list[Piece]]:
    """(pieces that compute the weight early, pieces of the rest)."""
    nodes = list(local.graph.nodes)
    by_name = {node.name: node for node in nodes}
    order = {node.name: index for index, node in enumerate(nodes)}
    ends = []
    for bucket in buckets:
        names = [local.gradients[name] for name in bucket.parameters if name in local.gradients]
        ends += [max(names, key=order.__getitem__)] if names else []
    early: list[Piece] = []
    wanted = {local.total, *local.gradients.values(), *local.new_buffers.values()}
    if graph.static_weight is None:
        if graph.weight_is_early:
            needed = _ancestors(by_name[local.weight])
            early = cut([n for n in nodes if n in needed], {local.weight}, (), f"{prefix}weight_", device)
        else:
            wanted.add(local.weight)
    needed = set().union(*(_ancestors(by_name[name]) for name in wanted))
    rest = cut([n for n in nodes if n in needed], wanted, ends, prefix, device)
    return early, rest


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    seen: set[torch.fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return seen
