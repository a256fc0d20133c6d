"""Stages of every size of a micro-batch, cut at the same places: ranks hold a parameter once for all sizes.

In: graphs by size, a plan. Out: `Stages` by size, or a `PlanError` where sizes do not agree.
"""

from collections.abc import Mapping, Sequence

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.job.updates.optimizer_state import Builder
from plait.plan.plan import DOMAIN, PIPE, TENSOR, Plan
from plait.program.cost.update import state_ratio
from plait.program.layout import Layout
from plait.program.stage.cut_by_cost import Room
from plait.program.stage.cut_places import moved, same_places
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import peak_in_flight
from plait.program.stage.stages import assign_stages, forward_ops
from plait.program.stage.where import Stages
from plait.units import parse_bytes


def _room(graph: Graph, plan: Plan, num_micro: int, build: Builder | None) -> Room:
    """The memory of a rank, shared by its stages, and what the schedule keeps in flight on each."""
    ranks, per_rank = plan.mesh.size_of(PIPE), plan.pipe.per_rank
    schedule = SCHEDULES["1f1b" if plan.pipe.asynchronous else plan.pipe.schedule]
    peaks = peak_in_flight(schedule(ranks, per_rank, num_micro))
    tensor = plan.mesh.size_of(TENSOR)
    return Room(
        limit_bytes=parse_bytes(str(plan.memory.limit)) // per_rank,
        in_flight=tuple(-(-peaks[stage % ranks] // per_rank) for stage in range(plan.num_stages)),
        held=plan.shards.held(
            parameters=1.0, gradients=1.0, optimizer=state_ratio(graph, build) if build is not None else 0.0
        ),
        parameter_parts=tensor,
        activation_parts=plan.data_ranks * plan.mesh.size_of(DOMAIN) * tensor,
    )


def stages_of(
    graphs: Mapping[int, Graph],
    plan: Plan,
    micro_batches: Sequence[int],
    layout: Layout | None,
    build: Builder | None,
) -> dict[int, Stages]:
    """Stages of every size of a micro-batch, cut at the same places; none without a pipeline."""
    if plan.num_stages == 1:
        return {}
    if plan.memory.zero > 1:
        raise PlanError(
            f"memory.zero={plan.memory.zero} with pipe={plan.mesh.size_of(PIPE)} would sum and gather in every"
            " micro-batch, which no schedule here has room for.",
            fix="set memory.zero=1, or 0.",
        )
    first = micro_batches[0]
    ops = {size: forward_ops(graph) for size, graph in graphs.items()}
    named = plan.pipe.cut
    starts = () if layout is None or named else moved(layout.starts, layout.ops, ops[first])
    shared = [same_places(ops[first], other) for other in ops.values()]
    places = set(shared[0]).intersection(*shared[1:])
    limited = plan.memory.limit is not None
    room = _room(graphs[first], plan, len(micro_batches), build) if limited else None
    found = {first: assign_stages(graphs[first], plan.num_stages, named, starts, places, room)}
    for size, graph in graphs.items():
        if size != first:
            there = () if named else moved(found[first].starts, ops[first], ops[size])
            found[size] = assign_stages(graph, plan.num_stages, named, there)
    ranks = plan.mesh.size_of(PIPE)
    _check_homes(graphs, found, found[first], layout, ranks)
    return found


def _check_homes(
    graphs: Mapping[int, Graph],
    found: Mapping[int, Stages],
    first: Stages,
    layout: Layout | None,
    ranks: int,
) -> None:
    """Refuse micro-batches of sizes whose gradients come from other stages: ranks hold a parameter once for all."""
    for size, stages in found.items():
        for name, parts in stages.gradients.items():
            homes, readers = ({stage % ranks for stage in some} for some in (parts, stages.parameters[name]))
            held = set(layout.owners[name]) if layout is not None else readers
            if parts.keys() != first.gradients[name].keys() or not homes <= held or readers != held:
                raise PlanError(
                    f"pipe: in a micro-batch of {graphs[size].num_samples} samples {name} is used by the stages "
                    f"{sorted(readers)} and its gradient comes from {sorted(parts)}; in others these are "
                    f"{sorted(held)} and {sorted(first.gradients[name])}.",
                    fix="use a batch of which all micro-batches are of one size and shape, another pipe.cut, or a plan "
                    "without stages.",
                )
