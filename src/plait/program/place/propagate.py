"""Choose, for every op of a graph, how it runs along one mesh axis.

In: a graph, how the axis cuts, and the placements of the graph's inputs. Out: a `Strategy` per op and the places where
tensors had to be gathered because no rule applied. The choice is the cheapest conversion at each op, in order; it
depends on the graph and the units of the axis, never on the number of ranks, so that one rank and many see the same
random numbers.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from plait.graph.cost import value_bytes
from plait.graph.graph import Graph
from plait.program.place.conversion_cost import conversion_cost
from plait.program.place.placement import (
    AxisShares,
    Placement,
    R,
    Shard,
    Strategy,
    overlaps,
)
from plait.program.place.rules import Op, find_rule
from plait.program.place.rules.base import further_rules, lists_outers
from plait.program.place.rules.dtensor_fallback import dtensor_strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """A tensor that had to be made whole because its op has no rule for the way it was cut, or an op without a rule."""

    op: str
    node: str
    module: str
    source: str
    num_bytes: int
    by_torch: bool = False
    """Nothing is made whole: a rule of torch's DTensor told how to run the op on shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    """What was chosen along one axis."""

    axis: AxisShares
    strategies: Mapping[fx.Node, Strategy]
    """For every op."""
    outputs: Mapping[fx.Node, tuple[Placement, ...]]
    """For every node, one entry per output tensor."""
    gathered: tuple[Gathered, ...]
    """Fallbacks, for `plait graph --placements`."""

    def of(self, node: fx.Node) -> Placement:
        """Placement of a node with one output."""
        return self.outputs[node][0]


Taken = Sequence[tuple[AxisShares, Strategy]]
"""How other axes run an op."""
Listed = dict[tuple[fx.Node, frozenset[int]], list[Strategy]]
"""Every way to run an op, by the `outer` of the shards that come in."""


def propagate(
    graph: Graph,
    axis: AxisShares,
    inputs: Mapping[str, Placement],
    *,
    pins: Mapping[fx.Node, Strategy] | None = None,
    others: Sequence["Placements"] = (),
    listed: Listed | None = None,
) -> Placements:
    """Placements of everything, given those of the inputs by placeholder name (replicated where not named).

    `pins` are strategies that ops must have; `others` are what was chosen on other axes, whose cuts are taken; `listed`
    keeps the ways to run ops for whoever asks again with the same graph, axis and others.
    """
    ways = {} if listed is None else listed
    pinned = pins or {}
    strategies: dict[fx.Node, Strategy] = {}
    outputs: dict[fx.Node, tuple[Placement, ...]] = {}
    gathered: list[Gathered] = []
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            outputs[node] = (inputs.get(node.name, R),)
        elif node.op == "call_function":
            if node.target is operator.getitem:
                outputs[node] = (outputs[node.args[0]][node.args[1]],)
                continue
            outers = {
                p.outer
                for n in node.all_input_nodes
                for p in outputs[n]
                if isinstance(p, Shard) and p.outer > 1
            }
            op = Op(node, axis, frozenset(outers))
            taken = [(p.axis, p.strategies[node]) for p in others]
            strategy = pinned.get(node)
            if strategy is None:
                strategy = _choose(op, outputs, gathered, taken, ways)
            strategies[node] = strategy
            outputs[node] = strategy.outputs
    return Placements(axis=axis, strategies=strategies, outputs=outputs, gathered=tuple(gathered))


def _choose(
    op: Op,
    outputs: Mapping[fx.Node, tuple[Placement, ...]],
    gathered: list[Gathered],
    taken: Taken,
    listed: Listed,
) -> Strategy:
    have = [outputs[tensor][0] for tensor in op.tensors]
    whole = op.same(R)
    rule = find_rule(op.node.target)
    if all(placement == R for placement in have):
        wanted = _wanted_by_users(op.node, outputs) if rule is not None and _makes_shards(op) else None
        if wanted is None or rule is None:
            return whole
        makes = (s for s in candidates(op, taken) if s.outputs[0] == wanted and set(s.inputs) <= {R})
        return next(makes, whole)
    sizes = [max(value_bytes(tensor.meta["val"]), 1) for tensor in op.tensors]
    key = (op.node, op.outers)
    if key not in listed:
        listed[key] = candidates(op, taken)
    best = min(listed[key], key=lambda s: _cost(sizes, have, s))
    if rule is None and best != whole:
        gathered.append(_fallback(op, 0, by_torch=True))
    if best == whole:
        for tensor, placement in zip(op.tensors, have, strict=True):
            if isinstance(placement, Shard):
                gathered.append(_fallback(op, value_bytes(tensor.meta["val"])))
    return best


def _fallback(op: Op, num_bytes: int, *, by_torch: bool = False) -> Gathered:
    meta = op.node.meta
    return Gathered(
        op=str(op.node.target), node=op.node.name, module=meta.get("module", ""), source=meta.get("source", ""),
        num_bytes=num_bytes, by_torch=by_torch,
    )  # fmt: skip


def candidates(op: Op, taken: Taken = ()) -> list[Strategy]:
    """Every way to run an op whose shards are whole units and not `taken`; the last one is "all replicated"."""
    rule = find_rule(op.node.target)
    listed = rule(op) if rule is not None else dtensor_strategies(op)
    if rule is not None and not lists_outers(rule):
        plain = [s for s in listed if not _has_outer(s)]
        listed = [*listed, *(_regrouped(s, outer) for outer in op.outers for s in plain)]
    listed = [*listed, *(s for more in further_rules(op.node.target) for s in more(op))]
    return [*(s for s in listed if _is_even(op, s) and _is_free(op, s, taken)), op.same(R)]


def _is_free(op: Op, strategy: Strategy, taken: Taken) -> bool:
    return not any(
        overlaps(a, op.axis, b, axis)
        for axis, other in taken
        for a, b in zip((*strategy.inputs, *strategy.outputs), (*other.inputs, *other.outputs), strict=True)
    )


def _is_even(op: Op, strategy: Strategy) -> bool:
    pairs = [*zip(strategy.inputs, op.shapes, strict=True), *zip(strategy.outputs, op.outputs, strict=True)]
    return all(_fits(op, placement, shape) for placement, shape in pairs)


def _fits(op: Op, placement: Placement, shape: tuple[int, ...]) -> bool:
    if not isinstance(placement, Shard) or not shape:  # an output that is absent has no shape
        return True
    extent = shape[placement.dim]
    if placement.outer == 0:  # of a view of a tensor without elements
        return False
    return extent % placement.outer == 0 and op.axis.divides(extent // placement.outer)


def _has_outer(strategy: Strategy) -> bool:
    return any(isinstance(p, Shard) and p.outer > 1 for p in (*strategy.inputs, *strategy.outputs))


def _regrouped(strategy: Strategy, outer: int) -> Strategy:
    """The same strategy for shards of each of `outer` parts: rows are independent wherever a dim may be cut at all."""

    def regroup(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(Shard(p.dim, outer) if p == Shard(getattr(p, "dim", -1)) else p for p in placements)

    return Strategy(regroup(strategy.inputs), regroup(strategy.outputs))


def _cost(sizes: Sequence[int], have: Sequence[Placement], strategy: Strategy) -> float:
    return sum(conversion_cost(a, b) * size for size, a, b in zip(sizes, have, strategy.inputs, strict=True))


def _makes_shards(op: Op) -> bool:
    """Factories and random numbers, whose shards can be made where they are used."""
    name = str(op.node.target)
    if name.startswith("plait."):
        return True
    return "index" not in name and not any(t.op == "call_function" for t in op.tensors)


def _wanted_by_users(
    node: fx.Node, outputs: Mapping[fx.Node, tuple[Placement, ...]], depth: int = 4
) -> Placement | None:
    """How the first op that combines this tensor with a placed one of the same shape has that one."""
    if depth == 0 or not isinstance(node.meta["val"], torch.Tensor):
        return None
    shape = node.meta["val"].shape
    for user in node.users:
        value = user.meta.get("val")
        if user.op != "call_function" or not isinstance(value, torch.Tensor) or value.shape != shape:
            continue
        for other in user.all_input_nodes:
            known = outputs.get(other)
            same = (
                other is not node
                and isinstance(other.meta.get("val"), torch.Tensor)
                and other.meta["val"].shape == shape
            )
            if same and known is not None and isinstance(known[0], Shard):
                return known[0]
        found = _wanted_by_users(user, outputs, depth - 1)
        if found is not None:
            return found
    return None
