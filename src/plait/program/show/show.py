"""Write down for people what a plan makes of a graph.

In: a graph, a resolved plan and the program that was compiled from them. Out: a `Listing`. Nothing is chosen here, and
nothing is left out: what ops get whole because no rule cuts them is listed with the reason.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from plait.graph.cost import value_bytes
from plait.graph.graph import Graph
from plait.plan.plan import DATA, Plan
from plait.program.instructions import Collective
from plait.program.local.ends import ends_of
from plait.program.local.localize import localize
from plait.program.place.place import place
from plait.program.place.placement import Placement, R, Shard, Strategy
from plait.program.place.propagate import Placements, candidates
from plait.program.place.rules import Op, find_rule
from plait.program.place.rules.base import further_rules
from plait.program.program import Program
from plait.program.show.listing import Fallback, HeldParameter, Listing, PlacedOp, Total
from plait.program.show.names import Names, folded
from plait.program.show.transfers import local_changes, transfers


def list_placements(graph: Graph, plan: Plan, program: Program, *, local_batch_norm: bool = False) -> Listing:
    """Everything about the first micro-batch of `program`, which was compiled from `graph` under `plan`."""
    chosen = place(graph, plan, program.shares[0])
    ends = [ends_of(graph, p, plan) for p in chosen]
    local = localize(
        graph, chosen, program.layout.coordinates(0), local_batch_norm=local_batch_norm, ends=ends
    )
    several = [placements for placements in chosen if placements.axis.size > 1]
    names = Names(graph)
    return Listing(
        plan=plan.name,
        axes=tuple((placements.axis.name, placements.axis.size) for placements in several),
        num_samples=graph.num_samples,
        num_micro_batches=len(program.micro_batches),
        zero=program.layout.zero if program.layout.groups else 0,
        parameters=_parameters(graph, several, program, names),
        ops=_ops(graph, several, names),
        transfers=(*local_changes(local, chosen, names), *transfers(local, chosen, program, names)),
        fallbacks=_fallbacks(several, names),
        totals=_totals(program),
    )


def _parameters(
    graph: Graph, chosen: Sequence[Placements], program: Program, names: Names
) -> tuple[HeldParameter, ...]:
    nodes = graph.nodes()
    coordinates = program.layout.coordinates(0)

    cut = program.layout.zero == 3 and bool(program.layout.groups)
    ways: dict[str, set[tuple[Placement, ...]]] = {}
    for entry in graph.inputs_of("parameter"):
        node = nodes[entry.node]
        ways.setdefault(names(node), set()).add(tuple(placements.of(node) for placements in chosen))

    def rows() -> Iterator[HeldParameter]:
        for entry in graph.inputs_of("parameter"):
            node = nodes[entry.node]
            shape = list(program.layout.local_shape(entry.name, coordinates))
            yield HeldParameter(
                name=names(node) if len(ways[names(node)]) == 1 else entry.name,
                count=1,
                shape=tuple(node.meta["val"].shape),
                held=f"1/{program.plan.data_ranks} of {shape}" if cut else str(shape),
                placements=tuple(
                    "flat" if cut and placements.axis.name == DATA else str(placements.of(node))
                    for placements in chosen
                ),
                num_bytes=value_bytes(node.meta["val"]),
            )

    return folded(rows())


def _ops(graph: Graph, chosen: Sequence[Placements], names: Names) -> tuple[PlacedOp, ...]:
    nodes = [node for node in graph.ops() if node.target is not operator.getitem]
    ways: dict[str, set[tuple[Strategy, ...]]] = {}
    for node in nodes:
        ways.setdefault(names.folded[node], set()).add(tuple(p.strategies[node] for p in chosen))

    def rows() -> Iterator[PlacedOp]:
        for node in nodes:
            strategies = tuple(p.strategies[node] for p in chosen)
            alike = len(ways[names.folded[node]]) == 1
            key = (names.folded if alike else names.exact)[node]
            yield PlacedOp(
                key=key,
                count=1,
                module=names.module(node) if alike else node.meta.get("module", ""),
                phase=node.meta.get("phase", ""),
                op=str(node.target),
                strategies=tuple(map(str, strategies)),
                is_whole=all(p == R for s in strategies for p in (*s.inputs, *s.outputs)),
            )

    return folded(rows())


def _fallbacks(chosen: Sequence[Placements], names: Names) -> tuple[Fallback, ...]:
    def rows() -> Iterator[Fallback]:
        for index, placements in enumerate(chosen):
            others = [*chosen[:index], *chosen[index + 1 :]]
            for node, strategy in placements.strategies.items():
                have = [placements.of(tensor) for tensor in Op(node, placements.axis).tensors]
                outers = frozenset(p.outer for p in have if isinstance(p, Shard)) - {1}
                op = Op(node, placements.axis, outers)
                cut = [t for t, p in zip(op.tensors, have, strict=True) if isinstance(p, Shard)]
                if strategy == op.same(R):
                    taken = [(p.axis, p.strategies[node]) for p in others]
                    reason = _reason(op, have, taken) if cut else ""
                    for tensor in dict.fromkeys(cut):
                        yield _fallback(op, reason, names, tensor)
                elif not _has_rule(op):
                    yield _fallback(op, f"by torch's rule for DTensor, as {strategy}: none of ours", names)

    return folded(rows())


def _fallback(op: Op, reason: str, names: Names, tensor: fx.Node | None = None) -> Fallback:
    return Fallback(
        axis=op.axis.name,
        key=names.folded[op.node],
        count=1,
        op=str(op.node.target),
        module=names.module(op.node),
        source=op.node.meta.get("source", ""),
        tensor=names(tensor) if tensor is not None else "",
        num_bytes=value_bytes(tensor.meta["val"]) if tensor is not None else 0,
        reason=reason,
    )


def _has_rule(op: Op) -> bool:
    return find_rule(op.node.target) is not None or bool(further_rules(op.node.target))


def _reason(op: Op, have: Sequence[Placement], taken: Any) -> str:
    """Why an op gets its tensors whole that are cut as `have` says."""
    ways = [strategy for strategy in candidates(op, taken) if strategy != op.same(R)]
    if not ways and not _has_rule(op):
        return "no rule of ours or of torch's speaks for this op"
    cut = [index for index, placement in enumerate(have) if isinstance(placement, Shard)]
    fits = [way for way in ways if all(way.inputs[index] == have[index] for index in cut)]
    if fits:
        return f"whole is cheaper here than {fits[0]}"
    pieces = ", ".join(f"{list(op.shapes[index])} cut as {have[index]}" for index in cut)
    return f"no rule takes {pieces} in {op.axis.total} parts"


def _totals(program: Program) -> tuple[Total, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for instruction in program.of(0).instructions:
        if isinstance(instruction, Collective):
            counts[(instruction.axis, instruction.op)] += 1
            sizes[(instruction.axis, instruction.op)] += instruction.num_bytes
    return tuple(
        Total(axis=axis, collective=kind, count=count, num_bytes=sizes[(axis, kind)])
        for (axis, kind), count in sorted(counts.items())
    )
