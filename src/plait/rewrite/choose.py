"""Whether a graph is rewritten: what the plan says, or where it is expected to pay.

In: a graph, a plan, the device, the length of the run. Out: what became of the graph; None: it stays, and nobody has to
be told. The same on all ranks of a host: it depends on the kind of device, not on a measurement or a clock.
"""

from dataclasses import replace
from importlib.util import find_spec

import torch

from plait.cluster.cluster import Device
from plait.cluster.devices import DEVICES, Preset
from plait.graph.graph import Graph
from plait.plan.plan import TENSOR, Plan
from plait.program.cost.op_time import node_work, op_seconds
from plait.rewrite.rewrite import Rewritten, rewrite
from plait.rewrite.terms import neighbours, read_terms

_LEAST_GAIN = 0.1
"""Share of a step that rewriting must be predicted to save."""
_MOST_GAIN = 0.3
"""Share that it saves at best, as far as is known before it is tried."""
_SECONDS = 2.0
"""That a search takes at least."""
_SECONDS_PER_OP = 2e-3
"""And for every op of the graph."""


def preset_like(device: torch.device) -> Preset:
    """A device of this kind and its host, by which ways are compared."""
    return DEVICES["H100" if device.type == "cuda" else "cpu"]


def settled_for(tasks: int, plan: Plan) -> Plan:
    """The plan of a run of several tasks, each of which compiles on its own.

    They may have other versions of a solver, other devices, or no egglog: what they would choose for themselves need
    not be the same, so nothing is rewritten that was not asked for.
    """
    return replace(plan, rewrite="off") if tasks > 1 and plan.rewrite == "auto" else plan


def rewrite_where_it_pays(
    graph: Graph, plan: Plan, device: torch.device, steps: int | None
) -> Rewritten | None:
    """Rewrite a graph, or leave it.

    Pipelines are cut between what the user wrote, unless they are asked to rewrite: what is merged may join two stages.
    Where weights are cut, those of one shape merge alone: each of them is then cut as it would be by itself.
    """
    if plan.rewrite == "off":
        return None
    kind, alike = preset_like(device).device, plan.mesh.size_of(TENSOR) > 1
    if plan.rewrite == "on":
        return rewrite(graph, kind, alike=alike)
    if (
        plan.num_stages > 1
        or steps is None
        or find_spec("egglog") is None
        or not _may_pay(graph, kind, steps)
    ):
        return None
    made = rewrite(graph, kind, alike=alike)
    return made if made.after_s < made.before_s * (1 - _LEAST_GAIN) else None


def _may_pay(graph: Graph, device: Device, steps: int) -> bool:
    """Whether the run is long enough to make up for the search, and there is something to merge or to reorder."""
    ops = list(graph.ops())
    step_s = sum(op_seconds(work, device) for node in ops if (work := node_work(node)) is not None)
    if steps * step_s * _MOST_GAIN < _SECONDS + _SECONDS_PER_OP * len(ops):
        return False
    return next(iter(neighbours(read_terms(graph))), None) is not None
