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
from plait.program.buckets import Ends, make_buckets, sums_of
from plait.program.build import StepBuilder, bucket_reads
from plait.program.check import check_program
from plait.program.cut import Piece, cut
from plait.program.gathers import groups_by_input
from plait.program.groups import make_layout
from plait.program.layout import Layout
from plait.program.localize import LocalGraph, ends_of, localize
from plait.program.pins import input_placements, pinned_strategies
from plait.program.placement import AxisShares, Placement, Shard, Strategy
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
    layout: Layout | None = None,
    plans: Mapping[int, Plan] | None = None,
) -> Program:
    """Compile one step of `micro_batches`.

    `shares` are the samples of each rank of `data`, nearly equal where not given; `layout` is where the run already
    holds its parameters; `plans` are the plans of micro-batches for whose size ops were chosen anew.
    """
    given = (
        tuple(shares)
        if shares is not None
        else tuple(equal_shares(size, plan.data_ranks) for size in micro_batches)
    )
    chosen = {
        (size, units): place(graphs[size], (plans or {}).get(size, plan), units)
        for size, units in zip(micro_batches, given, strict=True)
    }
    first, placed = graphs[micro_batches[0]], chosen[(micro_batches[0], given[0])]
    sharded = plan.memory.zero > 0 and plan.data_ranks > 1
    ends = [ends_of(first, p, summed=sharded and p.axis.name == DATA) for p in placed]
    sums = sums_of(first, ends, [p.axis for p in placed])
    if layout is None:
        layout = make_layout(first, placed, plan, sums)
    buckets = make_buckets(first, sums, layout, plan)
    compiler = _Compiler(graphs, chosen, plan, micro_batches, given, ends, buckets, layout, settings)
    classes: list[RankProgram] = []
    index_of: dict[tuple[int, ...], int] = {}
    members = []
    for rank in range(plan.mesh.size):
        own = tuple(units[plan.data_coordinate(rank)] for units in given)
        if own not in index_of:
            index_of[own] = len(classes)
            classes.append(compiler.rank(rank))
        members.append(index_of[own])
    weights = [graphs[size].static_weight for size in micro_batches]
    program = Program(
        plan=plan,
        micro_batches=tuple(micro_batches),
        shares=given,
        buckets=buckets,
        classes=tuple(classes),
        members=tuple(members),
        layout=layout,
        gathered=tuple(entry for p in placed if p.axis.size > 1 for entry in p.gathered),
        notices=first.notices,
        total_weight=None if None in weights else float(sum(w for w in weights if w is not None)),
    )
    check_program(program)
    return program


def place(graph: Graph, plan: Plan, units: tuple[int, ...]) -> tuple[Placements, ...]:
    """Placements of everything on every axis of the mesh; `units` are the samples of each rank of `data`."""
    found: dict[str, Placements] = {}
    for name, size in sorted(plan.mesh.axes, key=lambda axis: axis[0] != DATA):
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
    return tuple(found[name] for name, _ in plan.mesh.axes)


class _Compiler:
    def __init__(
        self,
        graphs: Mapping[int, Graph],
        chosen: Mapping[tuple[int, tuple[int, ...]], tuple[Placements, ...]],
        plan: Plan,
        micro_batches: Sequence[int],
        shares: Sequence[tuple[int, ...]],
        ends: Ends,
        buckets: tuple[Bucket, ...],
        layout: Layout,
        settings: Settings,
    ) -> None:
        self.graphs, self.chosen, self.plan = graphs, chosen, plan
        self.micro_batches, self.shares, self.ends = micro_batches, shares, ends
        self.buckets, self.layout, self.settings = buckets, layout, settings

    def rank(self, rank: int) -> RankProgram:
        """What the ranks with the same samples as `rank` do."""
        settings = self.settings
        builder = StepBuilder(self.plan, self.buckets, self.layout, settings.clip_norm, settings.device)
        done: dict[tuple[int, tuple[int, ...]], tuple[LocalGraph, list[Piece], list[Piece]]] = {}
        for number, key in enumerate(zip(self.micro_batches, self.shares, strict=True)):
            graph = self.graphs[key[0]]
            if key not in done:
                local = localize(
                    graph,
                    self.chosen[key],
                    self.plan.mesh.coordinates(rank),
                    local_batch_norm=self.settings.batch_norm == "local",
                    ends=self.ends,
                )
                pieces = _pieces(
                    graph, local, self.buckets, self.layout, f"{len(done)}.", self.settings.device
                )
                done[key] = (local, *pieces)
            builder.add_micro_batch(graph, *done[key], number)
        return builder.finish()


def _pieces(
    graph: Graph,
    local: LocalGraph,
    buckets: tuple[Bucket, ...],
    layout: Layout,
    prefix: str,
    device: torch.device,
) -> tuple[list[Piece], list[Piece]]:
    """(pieces that compute the weight early, pieces of the rest)."""
    nodes = list(local.graph.nodes)
    by_name = {node.name: node for node in nodes}
    order = {node.name: index for index, node in enumerate(nodes)}
    ends = []
    for index in range(len(buckets)):
        names = bucket_reads(graph, local, buckets, index)
        ends += [max(names, key=order.__getitem__)] if names else []
    group_of = groups_by_input(graph, layout)
    early: list[Piece] = []
    wanted = {local.total, *local.gradients.values(), *local.new_buffers.values()}
    if graph.static_weight is None:
        if graph.weight_is_early:
            needed = _ancestors(by_name[local.weight])
            early = cut(
                [n for n in nodes if n in needed], {local.weight}, (), f"{prefix}weight_", device, group_of
            )
        else:
            wanted.add(local.weight)
    needed = set().union(*(_ancestors(by_name[name]) for name in wanted))
    rest = cut([n for n in nodes if n in needed], wanted, ends, prefix, device, group_of)
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
