"""Give every op of a graph its stage of a pipeline. Any cut is legal; the model is not edited.

In: a graph, the number of stages, optionally the modules with which stages begin. Out: for every node the stages that
run it. The forward is cut where the slowest stage is least slow (dynamic programming over the costs of ops in order); a
backward op runs where its forward op ran, or earlier where its gradients come from. What depends on the batch alone,
and views, are copied into every stage that reads them, so that they are never sent.
"""

import operator
from collections.abc import Collection, Sequence

from torch import fx

from plait.errors import PlanError
from plait.graph.cost import node_flops, value_bytes
from plait.graph.graph import Graph
from plait.graph.storage import is_item, shows_input
from plait.program.stage.changing import changing, settle, uncut
from plait.program.stage.cut_by_cost import Room, real_users, starts_by_cost
from plait.program.stage.where import Stages, described, is_copied, texts_of

FLOPS_PER_BYTE = 10.0
"""How many FLOPs take as long as one byte of a tensor that an op writes: what decides between op costs."""


def assign_stages(
    graph: Graph,
    num_stages: int,
    cut: Sequence[str] = (),
    starts: Sequence[int] = (),
    places: Collection[int] | None = None,
    room: Room | None = None,
) -> Stages:
    """Stages of all nodes; `cut` names the modules with which the second and later stages begin.

    `starts`: where they begin, where that is known; `places`: where they may begin; None: anywhere. `room`: the memory
    that stages may use.
    """
    free = _free_nodes(graph)
    forward = _forward(graph, free)
    backward_cost = _backward_costs(graph)
    costs = [op_cost(node) + backward_cost.get(node.name, 0.0) for node in forward]
    groups = changing(graph)
    if cut:
        starts = _starts_by_module(forward, num_stages, cut)
    elif not starts:
        places = uncut(groups, forward, places)
        starts = starts_by_cost(forward, costs, num_stages, places, room, _memory(graph, forward))
    stage_of: dict[fx.Node, int] = {}
    for index, node in enumerate(forward):
        stage_of[node] = sum(index >= start for start in starts)
    homes = settle(groups, stage_of)
    _assign_backward(graph, free, stage_of)
    return described(graph, free, stage_of, num_stages, costs, forward, starts, homes)


def forward_ops(graph: Graph) -> tuple[str, ...]:
    """The ops between which a model can be cut, by target and module."""
    return texts_of(_forward(graph, _free_nodes(graph)))


def _forward(graph: Graph, free: set[fx.Node]) -> list[fx.Node]:
    return [
        node
        for node in graph.ops()
        if node.meta["phase"] != "backward" and node not in free and node.target is not operator.getitem
    ]


def _free_nodes(graph: Graph) -> set[fx.Node]:
    """Ops that depend on the batch, the tangent and constants alone: any stage can compute them."""
    bound = {entry.node for entry in graph.held}
    tied = {node for node in graph.graph.nodes if node.op == "placeholder" and node.name in bound}
    for node in graph.ops():
        if any(source in tied for source in node.all_input_nodes):
            tied.add(node)
    return {node for node in graph.ops() if node not in tied}


def op_cost(node: fx.Node) -> float:
    """FLOPs of an op, with what it writes counted in; a result of several is written by the op that makes it."""
    if shows_input(node) or is_item(node):
        return 0.0
    return node_flops(node) + FLOPS_PER_BYTE * value_bytes(node.meta["val"])


def _memory(graph: Graph, forward: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """For each forward op: bytes of the parameters that it is the first to use, and of what it keeps for backward."""
    nodes = graph.nodes()
    held = {
        nodes[entry.node]: value_bytes(nodes[entry.node].meta["val"])
        for entry in graph.inputs_of("parameter")
    }
    found = []
    for node in forward:
        own = sum(held.pop(source, 0) for source in node.all_input_nodes)
        read_later = any(user.meta.get("phase") == "backward" for user in real_users(node))
        kept = read_later and not shows_input(node)
        found.append((own, value_bytes(node.meta["val"]) if kept else 0))
    return found


def _backward_costs(graph: Graph) -> dict[str, float]:
    found: dict[str, float] = {}
    for node in graph.ops():
        if node.meta["phase"] == "backward":
            origin = node.meta.get("origin", "")
            found[origin] = found.get(origin, 0.0) + op_cost(node)
    return found


def _starts_by_module(forward: Sequence[fx.Node], num_stages: int, cut: Sequence[str]) -> list[int]:
    if len(cut) != num_stages - 1:
        raise PlanError(
            f"pipe.cut names {len(cut)} modules for {num_stages} stages.",
            fix=f"name the {num_stages - 1} modules with which the second and later stages begin.",
        )
    starts: list[int] = []
    for name in cut:
        found = next(
            (
                index
                for index, node in enumerate(forward)
                if node.meta.get("module", "") == name or node.meta.get("module", "").startswith(f"{name}.")
            ),
            None,
        )
        if found is None or (starts and found <= starts[-1]) or found == 0:
            known = list(dict.fromkeys(node.meta.get("module", "") for node in forward))
            reason = "no op belongs to it" if found is None else "it does not come after the one before"
            raise PlanError(
                f"pipe.cut: {name!r} cannot begin a stage: {reason}.",
                fix=f"name modules in the order in which they run: {', '.join(known[:8])} ...",
            )
        starts.append(found)
    return starts


def _assign_backward(graph: Graph, free: set[fx.Node], stage_of: dict[fx.Node, int]) -> None:
    by_name = {node.name: node for node in graph.graph.nodes}
    everywhere: set[fx.Node] = set()
    """Views that the backward takes of what the forward has: every stage makes its own."""
    for node in graph.ops():
        early = (s.meta.get("phase") != "backward" or s in everywhere for s in node.all_input_nodes)
        if is_copied(node) and all(early):
            everywhere.add(node)
        if node in free or node in stage_of:
            continue
        sources = [source for source in node.all_input_nodes if source in stage_of]
        if node.target is operator.getitem:
            stage_of[node] = stage_of[node.args[0]]  # type: ignore[index]
            continue
        if node.meta["phase"] != "backward":
            stage_of[node] = max((stage_of[s] for s in sources), default=0)
            continue
        later = [stage_of[s] for s in sources if s.meta["phase"] == "backward" and s not in everywhere]
        origin = by_name.get(node.meta.get("origin", ""))
        own = stage_of.get(origin) if origin is not None else None
        if own is None:
            own = min(later) if later else max((stage_of[s] for s in sources), default=0)
        stage_of[node] = min([own, *later])
