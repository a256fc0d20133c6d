"""How what leaves the graph of a rank is placed: its total, its weight and the gradients.

In: a global graph and the placements on one axis. Out: a placement by name.
"""

from plait.graph.graph import Graph
from plait.plan.plan import DATA, Plan
from plait.program.place.placement import Partial, Placement, R, Shard
from plait.program.place.propagate import Placements


def ends_of(graph: Graph, placements: Placements, plan: Plan | None = None) -> dict[str, Placement]:
    """How what leaves a graph is placed: gradients like their parameters, partial sums as they are, the rest whole.

    What the plan sums over ranks in any case leaves as a partial sum: gradients of which ranks then hold a shard, and
    all that goes to servers.
    """
    served = plan is not None and plan.agreement.weights == "server"
    sharded = plan is not None and plan.memory.zero > 0 and plan.data_ranks > 1
    summed = served or (sharded and placements.axis.name == DATA)
    nodes = graph.nodes()
    found: dict[str, Placement] = {}
    for name, node in (("total", graph.total), ("weight", graph.weight)):
        found[name] = Partial() if isinstance(placements.of(nodes[node]), Partial) else R
    if graph.weight_is_shared and placements.axis.name == DATA:
        found["weight"] = Partial()
    if served:
        late = graph.static_weight is None and not graph.weight_is_early
        found |= dict.fromkeys(("total", *(("weight",) if late else ())), Partial())
    held = {entry.name: placements.of(nodes[entry.node]) for entry in graph.inputs_of("parameter")}
    for name, node in graph.gradients.items():
        own = held.get(name, R)
        if isinstance(own, Shard):
            found[f"gradient:{name}"] = own
        else:
            by_shape = (
                name in graph.conditional and placements.axis.name == DATA
            )  # other ranks may have a sum
            is_sum = summed or by_shape or isinstance(placements.of(nodes[node]), Partial)
            found[f"gradient:{name}"] = Partial() if is_sum else R
    return found
