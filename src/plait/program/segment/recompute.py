"""Run ops of the forward again in the backward, so that their results need not be kept in between.

In: a local graph, and which of its forward ops run again (`recompute_choice.py` chooses them). Out: the same graph with
copies of these ops in the backward, each just before its first reader; what the backward read of the originals it reads
of the copies. Nothing is communicated twice, random numbers are counted and so come out the same, and new buffers
come from the originals: the results are the same numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from plait.graph.graph import Graph
from plait.graph.storage import is_item
from plait.program.cost.memory import step_memory
from plait.program.instructions import Compute
from plait.program.local.local_graph import LocalGraph
from plait.program.program import Program
from plait.program.segment.cut import is_collective
from plait.program.stage.where import Stages
from plait.units import format_bytes, format_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """Which ops of a forward run again in its backward, where the backward needs what they make."""

    nodes: frozenset[str]
    """Names in the local graph for which it was chosen."""
    ops: Mapping[tuple[str, int], bool]
    """The same by global ops, as `op_of` names them, for all of the forward."""
    order: tuple[str, ...]
    """All names of that local graph: in a graph with other ones (a rank without samples), `ops` tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """What running ops again does to a step, by rank."""

    kept_bytes: tuple[int, ...]
    """Most that was alive of activations at once where nothing runs again."""
    saved_bytes: tuple[int, ...]
    """By how much less it is; less than 0 where it is more."""
    flops: tuple[int, ...]
    """FLOPs of a step where nothing runs again."""
    added_flops: tuple[int, ...]
    """FLOPs of what runs again."""

    def __str__(self) -> str:
        entries = zip(self.kept_bytes, self.saved_bytes, self.flops, self.added_flops, strict=True)
        told: dict[str, list[int]] = {}
        for rank, (kept, saved, flops, added) in enumerate(entries):
            share = f"{saved / kept:.0%}" if kept else "0%"
            more = f"{added / flops:.1%}" if flops else "0%"
            text = f"{format_bytes(saved)} of {format_bytes(kept)} of activations saved ({share})"
            told.setdefault(f"{text}, {format_flops(added)} added ({more})", []).append(rank)
        if len(told) == 1:
            return next(iter(told)) + (" on every rank" if len(self.flops) > 1 else "")
        return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in told.items())


def recompute(source: Graph, local: LocalGraph, again: Again, stages: Stages | None = None) -> LocalGraph:
    """Copy what runs again into the backward of `local`, whose graph is changed in place."""
    graph = local.graph
    dropped = _nodes_of(source, local, again, stages)
    copies: dict[fx.Node, fx.Node] = {}
    for reader in list(graph.nodes):
        if not is_backward(reader):
            continue
        for used in reader.all_input_nodes:
            if used in dropped:
                if used not in copies:
                    _copy(graph, used, reader, dropped, copies)
                reader.replace_input_with(used, copies[used])
    graph.eliminate_dead_code()
    return local


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a local graph belongs to the backward."""
    return node.op == "call_function" and node.meta["phase"] == "backward"


def forward_nodes(local: LocalGraph) -> Iterator[fx.Node]:
    """The computing nodes of a local graph that are not in its backward, in order."""
    return (node for node in local.graph.nodes if node.op == "call_function" and not is_backward(node))


def op_of(node: fx.Node) -> tuple[str, int]:
    """The global op that a node stands for, and which of its results; -1: the op itself, -2: it readies an input."""
    if is_item(node):
        made, index = cast("tuple[fx.Node, int]", node.args)
        return made.meta["lowers"], index
    return node.meta["lowers"], -2 if "change" in node.meta else -1


def compare(program: Program, without: Program) -> Recomputed:
    """What a program saves and adds, beside the one of the same step in which nothing runs again."""
    ranks = range(program.plan.mesh.size)
    kept = [step_memory(without, rank).activations for rank in ranks]
    flops = [step_flops(without, rank) for rank in ranks]
    return Recomputed(
        kept_bytes=tuple(kept),
        saved_bytes=tuple(kept[rank] - step_memory(program, rank).activations for rank in ranks),
        flops=tuple(flops),
        added_flops=tuple(step_flops(program, rank) - flops[rank] for rank in ranks),
    )


def step_flops(program: Program, rank: int) -> int:
    """FLOPs that a rank computes in one step."""
    own = program.of(rank)
    return sum(own.segments[i.segment].flops for i in own.instructions if isinstance(i, Compute))


def frontier(source: Graph, local: LocalGraph, stages: Stages | None) -> set[fx.Node]:
    """Forward ops that never run again: communication, what other stages read, what reads a buffer before it changes.

    The statistics of a batch norm do not depend on the buffers that it reads.
    """
    changing = {entry.node for entry in source.held if entry.name in local.new_buffers}
    everywhere = tuple(range(stages.num_stages)) if stages is not None else ()
    of = {node.name: found for node, found in stages.of.items()} if stages is not None else {}

    def runs(node: fx.Node) -> set[int]:
        return set(of.get(node.meta.get("lowers", ""), ()) or everywhere)

    found = {
        node
        for node in forward_nodes(local)
        if is_collective(node)
        or (
            node.target is not torch.ops.plait.batch_norm.default
            and any(used.op == "placeholder" and used.name in changing for used in node.all_input_nodes)
        )
        or any(not runs(user) <= runs(node) for user in node.users if user.op == "call_function")
    }
    return found | {user for node in found for user in node.users if is_item(user)}


def _nodes_of(source: Graph, local: LocalGraph, again: Again, stages: Stages | None) -> set[fx.Node]:
    nodes = list(local.graph.nodes)
    if tuple(node.name for node in nodes) == again.order:
        return {node for node in nodes if node.name in again.nodes}
    dropped = set()
    for node in forward_nodes(local):
        name, index = op_of(node)
        if again.ops.get((name, index), again.ops.get((name, -1), False)):
            dropped.add(node)
    return dropped - frontier(source, local, stages)


def _copy(
    graph: fx.Graph, node: fx.Node, reader: fx.Node, dropped: set[fx.Node], copies: dict[fx.Node, fx.Node]
) -> None:
    """Copy a node, and before it what it needs that is not kept, in front of `reader`."""
    stack = [node]
    while stack:
        current = stack[-1]
        missing = [used for used in current.all_input_nodes if used in dropped and used not in copies]
        if missing:
            stack += missing
            continue
        stack.pop()
        if current in copies:
            continue
        with graph.inserting_before(reader):
            args, kwargs = fx.map_arg((current.args, current.kwargs), lambda used: copies.get(used, used))
            new = graph.create_node("call_function", current.target, args, kwargs, f"{current.name}_again")
        new.meta |= {**current.meta, "phase": "backward"}
        copies[current] = new
