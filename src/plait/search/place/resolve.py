"""Fill in what a plan leaves open: placements along `tensor` and `domain`.

In: the graph of a micro-batch and a plan. Out: the plan with placements for every axis of its mesh, and how each was
chosen, in words. What a person wrote comes first and is never changed; a pattern or the search chooses around it.
Called once per job, before anything is compiled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from torch import fx

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.job.order import shares
from plait.job.updates.optimizer_state import Builder
from plait.plan.placements import AxisPlacements
from plait.plan.plan import DOMAIN, TENSOR, Plan
from plait.program.cost.update import state_ratio
from plait.program.place.op_keys import find_blocks, fold_path
from plait.program.place.pins import input_placements, pinned_strategies
from plait.program.place.place import placed_on_data
from plait.program.place.placement import AxisShares, Placement, Shard, Strategy
from plait.program.place.propagate import Placements, propagate
from plait.search.place.cost import Cost, flow_cost
from plait.search.place.domain_pattern import domain_batch
from plait.search.place.entries import as_entries
from plait.search.place.flow import Flow
from plait.search.place.megatron import Pattern, describe, megatron, require_use
from plait.search.place.problem import pose
from plait.search.place.solve import Solution, SolverLimits, solve
from plait.units import format_bytes, format_seconds, parse_bytes

_BLOCKED_SHOWN = 4
"""Layers that stay whole, named one by one."""
_MOST_UNFOLDED = 400
"""Ops of a graph that is also solved without folding, where folding costs something."""
_GIVEN_UP = 5
"""Times that limit: nobody waits longer. What is found then may differ between ranks, which they tell at the start."""
_NODES_PER_S = 5
"""Parts of the tree of choices at which a usual processor looks in a second, for graphs of a few hundred ops."""


def resolve_placements(
    graph: Graph, plan: Plan, build: Builder | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """The plan with all placements, and how they were chosen.

    `build` makes the job's optimizer, whose state counts as memory; None: memory without an optimizer.
    """
    notices: list[str] = []
    for name, size in plan.mesh.axes:
        if size > 1 and name in (DOMAIN, TENSOR):
            chosen, said = _domain(graph, plan) if name == DOMAIN else _tensor(graph, plan, build)
            others = tuple(entry for entry in plan.placements if entry.axis != name)
            plan = replace(plan, placements=(*others, chosen))
            notices += said
    return plan, tuple(notices)


def resolve_again(graph: Graph, written: Plan, resolved: Plan, build: Builder | None = None) -> Plan:
    """The plan for a micro-batch of another shape: parameters are held as `resolved` says, ops are chosen anew.

    `written` is the plan before it was resolved for the first graph, with the ops that a person named.
    """
    kept = []
    for entry in resolved.placements:
        said = written.placements_of(entry.axis)
        rest = (("*", "R"),) if entry.axis == TENSOR else ()
        kept.append(
            replace(entry, parameters=(*entry.parameters, *rest), ops=said.ops if said is not None else ())
        )
    again, _ = resolve_placements(graph, replace(resolved, placements=tuple(kept)), build)
    return again


def _domain(graph: Graph, plan: Plan) -> tuple[AxisPlacements, list[str]]:
    said = plan.placements_of(DOMAIN) or AxisPlacements(axis=DOMAIN)
    size = plan.mesh.size_of(DOMAIN)
    if said.batch:
        return said, [f"domain={size}: the batch is cut as the plan says."]
    batch = domain_batch(graph, size, plan.domain.dim)
    cut = ", ".join(f"{name} {text}" for name, text in batch)
    return replace(said, batch=batch), [f"domain={size}: the batch is cut by pattern: {cut}."]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """What a person wrote, on the nodes of the graph."""

    fixed: Mapping[fx.Node, Placement]
    pins: Mapping[fx.Node, Strategy]


def _tensor(graph: Graph, plan: Plan, build: Builder | None) -> tuple[AxisPlacements, list[str]]:
    said = plan.placements_of(TENSOR) or AxisPlacements(axis=TENSOR)
    axis = AxisShares(name=TENSOR, units=(1,) * plan.mesh.size_of(TENSOR))
    flow = Flow(graph, axis, _others(graph, plan), held=_held(graph, plan, build))
    nodes = graph.nodes()
    given = _Given(
        fixed={nodes[name]: placement for name, placement in input_placements(graph, axis, said).items()},
        pins=pinned_strategies(graph, axis, said),
    )
    pattern = megatron(flow, given.fixed, given.pins, sequence=plan.tensor.sequence)
    require_use(flow, pattern)
    cost = flow_cost(flow, pattern.placements)
    notices = [_say(flow, "by pattern", pattern.placements, cost)]
    if plan.tensor.sequence and "reduce_scatter" not in cost.collectives:
        notices.append(
            f"{axis.name}={axis.size}: tensor.sequence changes nothing: no positions that {axis.size} divides "
            "lie between the layers."
        )
    chosen = pattern.placements
    if plan.tensor.choice == "auto":
        found, notice = _search(flow, given, plan, cost)
        notices.append(notice)
        chosen = found or chosen
    if chosen is pattern.placements:
        notices += _say_blocked(flow, pattern)
    entries = as_entries(flow, chosen)
    if said.parameters or said.batch or said.ops:
        notices.append(f"{axis.name}={axis.size}: the placements that the plan names are kept.")
    return (
        AxisPlacements(
            axis=TENSOR,
            parameters=_after(said.parameters, entries.parameters),
            batch=said.batch,
            ops=_after(said.ops, entries.ops),
        ),
        notices,
    )


def _after(
    first: tuple[tuple[str, str], ...], then: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    named = {name for name, _ in first}
    return (*first, *(entry for entry in then if entry[0] not in named))


def _others(graph: Graph, plan: Plan) -> list[Placements]:
    """What other axes cut. `data` has the samples even where it has one rank, as in `compile`."""
    found = [placed_on_data(graph, shares(graph.num_samples, plan.data_ranks))]
    said = plan.placements_of(DOMAIN)
    if said is not None and plan.mesh.size_of(DOMAIN) > 1:
        axis = AxisShares(name=DOMAIN, units=(1,) * plan.mesh.size_of(DOMAIN))
        found.append(
            propagate(
                graph,
                axis,
                input_placements(graph, axis, said),
                pins=pinned_strategies(graph, axis, said),
                others=found,
            )
        )
    return found


def _held(graph: Graph, plan: Plan, build: Builder | None) -> float:
    """Bytes on a rank for each byte of a trained parameter, some of them sharded over `data`."""
    state = state_ratio(graph, build) if build is not None else 0.0
    return plan.shards.held(parameters=1.0, gradients=1.0, optimizer=state)


def _search(flow: Flow, given: _Given, plan: Plan, pattern: Cost) -> tuple[Placements | None, str]:
    """The solver's choice where it is valid and no worse than the pattern, and what to say about it."""
    limit = pattern.memory_bytes
    if plan.memory.limit is not None:
        limit = float(parse_bytes(plan.memory.limit))
    for blocks in (True, False):
        if not blocks and len(flow.ops) > _MOST_UNFOLDED:
            break
        problem = pose(flow, given.fixed, given.pins, blocks=blocks)
        fits = pattern.memory_bytes <= limit
        limits = SolverLimits(
            memory_bytes=limit,
            num_bytes=pattern.num_bytes if fits else inf,
            total=pattern.total if fits else inf,
            nodes=max(1, round(plan.tensor.seconds * _NODES_PER_S)),
            seconds=plan.tensor.seconds * _GIVEN_UP,
        )
        solution = solve(problem, limits)
        if solution.chosen is not None:
            placements = problem.placements(solution.chosen)
            cost = flow_cost(flow, placements)
            if _is_better(cost, pattern, limit):
                how = "proven least" if solution.is_proven else f"best of {limits.nodes} nodes"
                said = _say(flow, f"by search ({how}, {format_seconds(solution.seconds)})", placements, cost)
                return placements, said
    if pattern.memory_bytes > limit:
        raise PlanError(
            f"axis {flow.axis.name}={flow.axis.size}: no placements were found that need less "
            f"than memory.limit={plan.memory.limit}; the pattern needs {format_bytes(pattern.memory_bytes)}.",
            fix="raise memory.limit, or use more ranks.",
        )
    return None, f"{flow.axis.name}={flow.axis.size}: the pattern is used: {_why_not(solution)}."


def _is_better(cost: Cost, pattern: Cost, limit: float) -> bool:
    tolerance = 1 + 1e-6
    if cost.memory_bytes > limit * tolerance:
        return False
    cheaper = cost.num_bytes <= pattern.num_bytes * tolerance and cost.total <= pattern.total * tolerance
    return cheaper or pattern.memory_bytes > limit


def _why_not(solution: Solution) -> str:
    taken = format_seconds(solution.seconds)
    if solution.chosen is None:
        return f"the solver found nothing in {taken} ({solution.message})"
    return f"the solver found nothing better in {taken}"


def _say(flow: Flow, how: str, placements: Placements, cost: Cost) -> str:
    cut = sum(isinstance(placements.of(node), Shard) for node in flow.parameters)
    collectives = ", ".join(f"{count} {kind}" for kind, count in sorted(cost.collectives.items()))
    return (
        f"{flow.axis.name}={flow.axis.size}: placements {how}: {cut} of {len(flow.parameters)} parameters cut; "
        f"{collectives or 'no collectives'}; {format_bytes(cost.num_bytes)} sent and "
        f"{format_bytes(cost.memory_bytes)} held a rank and micro-step."
    )


def _say_blocked(flow: Flow, pattern: Pattern) -> Sequence[str]:
    """Layers that stay whole, repeated blocks once."""
    blocks = find_blocks(flow.graph)
    seen: dict[tuple[str, str], str] = {}
    for entry in pattern.blocked:
        key = (fold_path(entry.layer.meta.get("module", ""), blocks), str(entry.op.target))
        seen.setdefault(key, f"{flow.axis.name}={flow.axis.size}: stays whole: {describe(entry, flow)}.")
    shown = list(seen.values())[:_BLOCKED_SHOWN]
    if len(seen) > len(shown):
        shown.append(f"{flow.axis.name}={flow.axis.size}: {len(seen) - len(shown)} more layers stay whole.")
    return shown
