"""Whether a plan does better with the graph that the user wrote than with a rewritten one.

In: both graphs, a plan, the kind of device. Out: why the written one is taken, or nothing. Both are placed: what is
merged may stand in the way of a cut. What is compared is the predicted step of a rank, and the memory that it holds.
"""

from dataclasses import dataclass

from torch import fx

from plait.cluster.devices import Preset
from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.job.order import shares
from plait.job.updates.optimizer_state import Builder
from plait.plan.plan import DOMAIN, TENSOR, Plan
from plait.program.place.place import place
from plait.rewrite.price import graph_seconds
from plait.search.place.cost import flow_cost
from plait.search.place.flow import Flow, is_cut
from plait.search.place.resolve import resolve_placements
from plait.units import format_bytes, format_seconds, parse_bytes

_TOLERANCE = 1 + 1e-6
"""By which costs that are equal differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """What a micro-step asks of a rank."""

    seconds: float
    memory_bytes: float


def better_as_written(
    written: Graph, rewritten: Graph, plan: Plan, kind: Preset, build: Builder | None
) -> str:
    """Why a plan keeps the graph that was written; empty: the rewritten one costs it no more."""
    cut = [f"{name}={plan.mesh.size_of(name)}" for name in (TENSOR, DOMAIN) if plan.mesh.size_of(name) > 1]
    if not cut:
        return ""
    axes = " x ".join(cut)
    try:
        after = _placed(rewritten, plan, kind, build)
    except PlanError as error:
        return f"{axes} cannot place the rewritten one: {error.what.rstrip('.')}"
    try:
        before = _placed(written, plan, kind, build)
    except PlanError:
        return ""
    room = before.memory_bytes
    if plan.memory.limit is not None:
        room = max(room, float(parse_bytes(plan.memory.limit)))
    if after.memory_bytes > room * _TOLERANCE:
        return (
            f"over {axes} a rank holds {format_bytes(before.memory_bytes)} of it and "
            f"{format_bytes(after.memory_bytes)} of the rewritten one"
        )
    if after.seconds > before.seconds * _TOLERANCE:
        return (
            f"over {axes} a micro-step is predicted to take {format_seconds(before.seconds)}, and "
            f"{format_seconds(after.seconds)} of the rewritten one"
        )
    return ""


def _placed(graph: Graph, plan: Plan, kind: Preset, build: Builder | None) -> _Placed:
    """What a graph costs, placed as the plan would have it."""
    resolved, _ = resolve_placements(graph, plan, build)
    placed = place(graph, resolved, shares(graph.num_samples, plan.data_ranks))

    def share(node: fx.Node) -> float:
        part = 1.0
        for own in placed:
            if node in own.strategies and is_cut(own.strategies[node]):
                part /= own.axis.size
        return part

    seconds = graph_seconds(graph, kind.device, share)
    memory = 0.0
    for own in placed:
        if own.axis.name in (TENSOR, DOMAIN):
            cost = flow_cost(Flow(graph, own.axis, [other for other in placed if other is not own]), own)
            seconds += cost.num_bytes / kind.host.bandwidth
            seconds += sum(cost.collectives.values()) * kind.host.latency_s
            memory = max(memory, cost.memory_bytes)
    return _Placed(seconds=seconds, memory_bytes=memory)
