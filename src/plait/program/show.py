"""Write down for people what a plan makes of a graph.

In: a graph, a resolved plan and the program that was compiled from them. Out: a `Listing`. Nothing is chosen here, and
nothing is left out: what ops get whole because no rule cuts them is listed with the reason.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from plait.graph.cost import value_bytes
from plait.graph.graph import Graph
from plait.plan.plan import DATA, Plan
from plait.program.communicate import COLLECTIVES, local_piece
from plait.program.compile import place
from plait.program.instructions import Collective
from plait.program.listing import Exchange, Fallback, HeldParameter, Listing, PlacedOp, Total
from plait.program.local_functions import weighted_share
from plait.program.localize import Change, LocalGraph, ends_of, localize
from plait.program.op_keys import exact_keys, find_blocks, fold_path, op_keys
from plait.program.placement import Placement, R, Shard, Strategy
from plait.program.program import Program
from plait.program.propagate import Placements, candidates
from plait.program.rules import Op, find_rule
from plait.program.rules.base import further_rules


def list_placements(graph: Graph, plan: Plan, program: Program) -> Listing:
    """Everything about the first micro-batch of `program`, which was compiled from `graph` under `plan`."""
    chosen = place(graph, plan, program.shares[0])
    sharded = plan.memory.zero > 0 and plan.data_ranks > 1
    ends = [ends_of(graph, p, summed=sharded and p.axis.name == DATA) for p in chosen]
    local = localize(graph, chosen, plan.mesh.coordinates(0), local_batch_norm=False, ends=ends)
    several = [placements for placements in chosen if placements.axis.size > 1]
    names = _Names(graph)
    return Listing(
        plan=plan.name,
        axes=tuple((placements.axis.name, placements.axis.size) for placements in several),
        num_samples=graph.num_samples,
        num_micro_batches=len(program.micro_batches),
        zero=program.layout.zero if program.layout.groups else 0,
        parameters=_parameters(graph, several, program, names),
        ops=_ops(graph, several, names),
        exchanges=(*_local_changes(local, chosen, names), *_exchanges(local, chosen, program, names)),
        fallbacks=_fallbacks(graph, several, names),
        totals=_totals(program),
    )


class _Names:
    """What the nodes of a graph are called, with and without the numbers of blocks."""

    def __init__(self, graph: Graph) -> None:
        self.blocks = find_blocks(graph)
        self.exact, self.folded = exact_keys(graph), op_keys(graph)
        self.nodes = graph.nodes()
        self.inputs = {entry.node: entry.name for entry in graph.inputs}

    def __call__(self, node: fx.Node) -> str:
        if node.op == "call_function" and node.target is operator.getitem:
            source: Any = node.args[0]
            return f"{self(source)} [{node.args[1]}]"
        if node.op == "call_function":
            return self.folded[node]
        return fold_path(self.inputs.get(node.name, node.name), self.blocks)

    def module(self, node: fx.Node) -> str:
        return fold_path(node.meta.get("module", ""), self.blocks)


Row = TypeVar("Row", HeldParameter, PlacedOp, Exchange, Fallback)


def _folded(rows: Iterator[Row]) -> tuple[Row, ...]:
    """Rows that are equal but for their count, as one."""
    found: dict[Any, Row] = {}
    for row in rows:
        key = replace(row, count=0)
        known = found.get(key)
        found[key] = row if known is None else replace(known, count=known.count + row.count)
    return tuple(found.values())


def _parameters(
    graph: Graph, chosen: Sequence[Placements], program: Program, names: _Names
) -> tuple[HeldParameter, ...]:
    nodes = graph.nodes()
    coordinates = program.plan.mesh.coordinates(0)

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

    return _folded(rows())


def _ops(graph: Graph, chosen: Sequence[Placements], names: _Names) -> tuple[PlacedOp, ...]:
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

    return _folded(rows())


def _fallbacks(graph: Graph, chosen: Sequence[Placements], names: _Names) -> tuple[Fallback, ...]:
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

    return _folded(rows())


def _fallback(op: Op, reason: str, names: _Names, tensor: fx.Node | None = None) -> Fallback:
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


def _local_changes(local: LocalGraph, chosen: Sequence[Placements], names: _Names) -> tuple[Exchange, ...]:
    """Changes of placement for which ranks only take a part of what they have."""

    def rows() -> Iterator[Exchange]:
        seen: set[Change] = set()
        for node in local.graph.nodes:
            change = node.meta.get("change")
            if change is None or change in seen or node.target not in (local_piece, weighted_share):
                continue
            seen.add(change)
            axis = _axis_of_piece(change, chosen)
            yield _exchange(node, "none", axis, 0, change, chosen, names)

    return _folded(rows())


def _axis_of_piece(change: Change, chosen: Sequence[Placements]) -> str:
    found = [
        p.axis.name
        for p, have, want in zip(chosen, change.have, change.want, strict=True)
        if have != want and p.axis.size > 1
    ]
    return "+".join(found)


def _exchanges(
    local: LocalGraph, chosen: Sequence[Placements], program: Program, names: _Names
) -> tuple[Exchange, ...]:
    """What ops ask for in the first micro-batch, and what belongs to the step as a whole."""
    nodes = {node.name: node for node in local.graph.nodes if node.target in COLLECTIVES}

    def rows() -> Iterator[Exchange]:
        for instruction in program.of(0).instructions:
            if not isinstance(instruction, Collective):
                continue
            node = nodes.get(instruction.name.partition(" ")[2])
            if node is None:
                yield _of_the_step(instruction, program)
            elif instruction.micro_batch == 0:
                change = node.meta.get("change")
                yield _exchange(
                    node, instruction.op, instruction.axis, instruction.num_bytes, change, chosen, names
                )

    return _folded(rows())


def _exchange(
    node: fx.Node,
    collective: str,
    axis: str,
    num_bytes: int,
    change: Change | None,
    chosen: Sequence[Placements],
    names: _Names,
) -> Exchange:
    phase, source = node.meta.get("phase", ""), node.meta.get("source", "")
    if change is None:
        user = names(names.nodes[node.meta["lowers"]])
        what, text = "its own", ""
    else:
        axes = [p.axis.name for p in chosen]
        steps = [(change.have[axes.index(name)], change.want[axes.index(name)]) for name in axis.split("+")]
        what, text = names(change.tensor), ", ".join(f"{have} -> {want}" for have, want in steps)
        user = names(change.user) if change.user is not None and change.user != change.tensor else ""
    return Exchange(
        collective=collective,
        axis=axis,
        num_bytes=num_bytes,
        count=1,
        what=what,
        change=text,
        user=user,
        phase=phase,
        module=fold_path(node.meta.get("module", ""), names.blocks),
        source=source,
    )


def _of_the_step(instruction: Collective, program: Program) -> Exchange:
    """Communication that no op of the graph asks for: gradients, parameters of zero3, scalars."""
    what = instruction.name.partition(" ")[2]
    kind, _, number = what.replace(" ", ":").partition(":")
    if kind in ("bucket", "shard") and number.isdigit():
        bucket = program.buckets[int(number)]
        scalars = [f"the {name} of the loss" for name in bucket.scalars]
        members = [f"gradients of {len(bucket.parameters)} parameters"] if bucket.parameters else []
        what = " and ".join([*members, *scalars])
    elif kind == "parameters" and number.isdigit():
        what = f"{len(program.layout.groups[int(number)].parameters)} parameters"
    else:
        what = {"weight": "the weight of the loss", "squares": "the norm of all gradients"}.get(what, what)
    change = {"all_reduce": "P -> R", "reduce_scatter": "P -> S", "all_gather": "S -> R"}[instruction.op]
    phase = "update" if instruction.micro_batch is None else ""
    return Exchange(
        collective=instruction.op,
        axis=instruction.axis,
        num_bytes=instruction.num_bytes,
        count=1,
        what=what,
        change=change,
        user="",
        phase=phase,
        module="",
        source="",
    )


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
