"""The known pattern, on any model: weights cut by columns where a shard begins and by rows where it is summed.

In: the flow of a graph, what a person fixed. Out: placements of everything along the axis, and what could not be cut.
Attention by heads, MLPs by hidden units, convolutions by channels, the embedding and the output layer by vocabulary:
all are regions between layers (`regions.py`), found by how shards pass the ops and not by names of modules.
(Shoeybi et al. 2019, "Megatron-LM", section 3; with `sequence`, Korthikanti et al. 2022, section 4.2.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from plait.errors import PlanError
from plait.program.place.placement import P, Placement, R, Shard, Strategy
from plait.program.place.propagate import Placements, candidates
from plait.program.place.rules import Op
from plait.program.place.rules.base import aten
from plait.search.place.complete import complete
from plait.search.place.flow import Flow, value_of
from plait.search.place.regions import Blocked, Region, Regions

_SIZES = (12, 64, 512, 1 << 16)
"""Regions are looked for by their number of ops, small ones first: one that swallows a residual stream comes last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """The pattern on one graph."""

    placements: Placements
    parameters: Mapping[fx.Node, Placement]
    """Those that are cut."""
    blocked: tuple[Blocked, ...]
    """Layers whose weight stays whole, with the op that is in the way."""


def megatron(
    flow: Flow,
    fixed: Mapping[fx.Node, Placement],
    pins: Mapping[fx.Node, Strategy],
    *,
    sequence: bool = False,
) -> Pattern:
    """The pattern, around inputs and ops that are `fixed` and `pins`."""
    search = Regions(flow, fixed)
    chosen, blocked = _regions(search, pins)
    parameters: dict[fx.Node, Placement] = {n: p for n, p in fixed.items() if isinstance(p, Shard)}
    strategies: dict[fx.Node, Strategy] = {}
    for region in chosen:
        parameters |= region.parameters
        strategies |= region.strategies
    parameters |= _embeddings(flow, {**fixed, **parameters})
    placements = complete(flow, {**fixed, **parameters}, {**strategies, **pins}, sequence=sequence)
    layers = {region.seed for region in chosen} | {n for region in chosen for n in region.strategies}
    return Pattern(
        placements=placements,
        parameters=parameters,
        blocked=tuple(
            entry
            for entry in blocked
            if entry.layer not in layers and search.layers[entry.layer] not in fixed
        ),
    )


def _regions(search: Regions, pins: Mapping[fx.Node, Strategy]) -> tuple[list[Region], list[Blocked]]:
    chosen: list[Region] = []
    taken: set[fx.Node] = set(pins)
    cut: dict[fx.Node, Placement] = {}
    blocked: dict[fx.Node, Blocked] = {}
    for most_ops in _SIZES:
        for layer, weight in search.layers.items():
            if layer in taken or layer in blocked or search.fixed.get(weight) == R:
                continue
            found = search.of_layer(layer, most_ops)
            if isinstance(found, Blocked):
                blocked[layer] = found
            elif found is not None and _agrees(found, taken, cut):
                chosen.append(found)
                taken |= set(found.strategies)
                cut |= found.parameters
    return chosen, list(blocked.values())


def _agrees(region: Region, taken: set[fx.Node], cut: Mapping[fx.Node, Placement]) -> bool:
    same = all(cut.get(node, placement) == placement for node, placement in region.parameters.items())
    return same and not any(node in taken for node in region.strategies)


def _embeddings(flow: Flow, known: Mapping[fx.Node, Placement]) -> dict[fx.Node, Placement]:
    """Tables of words, cut by rows: more rows than columns, and looked up by what the batch says."""
    batch = {entry.node for entry in flow.graph.inputs_of("batch")}
    depends = {node for node in flow.graph.graph.nodes if node.name in batch}
    found: dict[fx.Node, Placement] = {}
    for node in flow.ops:
        if any(tensor[0] in depends for tensor in flow.reads[node]):
            depends.add(node)
        if getattr(node.target, "overloadpacket", None) is not aten.embedding:
            continue
        (table, _), (index, _) = flow.reads[node][:2]
        if table not in flow.parameters or table in known or index not in depends:
            continue
        rows, columns = table.meta["val"].shape
        able = [s for s in candidates(Op(node, flow.axis), flow.taken(node)) if s.outputs == (P,)]
        if rows >= columns and any(s.inputs == (Shard(0), R) for s in able):
            found[table] = Shard(0)
    return found


def require_use(flow: Flow, pattern: Pattern) -> None:
    """Refuse an axis along which nothing is cut."""
    if pattern.parameters:
        return
    size = flow.axis.size
    if not pattern.blocked:
        raise PlanError(
            f"axis {flow.axis.name}={size}: nothing can use it; the model has no layer whose weight can be cut.",
            fix=f"drop {flow.axis.name} from the mesh and use data={size}.",
        )
    reasons = "; ".join(describe(entry, flow) for entry in pattern.blocked[:3])
    raise PlanError(
        f"axis {flow.axis.name}={size}: nothing can use it: {reasons}.",
        fix=f"choose a size of {flow.axis.name} that divides these dims, or use data={size}.",
    )


def describe(entry: Blocked, flow: Flow) -> str:
    """One blocked layer in words."""
    size, op = flow.axis.size, entry.op
    layer = entry.layer.meta.get("module", "") or entry.layer.name
    packet = getattr(op.target, "overloadpacket", op.target)
    where = " ".join(x for x in (op.meta.get("module", ""), op.meta.get("source", "")) if x)
    value = value_of((op, 0))
    dim = entry.placement.dim if isinstance(entry.placement, Shard) else 0
    if op is entry.layer and entry.shape[dim] % size:
        return f"{layer}: {packet} ({where}) gives {list(entry.shape)}; {size} does not divide {entry.shape[dim]}"
    if op is entry.layer:
        return f"{layer}: nothing after {packet} ({where}) sums over its output {list(entry.shape)}"
    result = f" to {list(value.shape)}" if value is not None else ""
    return (
        f"{layer}: {packet} ({where}) cannot run on {size} shards {entry.placement} of "
        f"{list(entry.shape)}{result}"
    )
