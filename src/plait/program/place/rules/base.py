"""The vocabulary of the rules: an op seen by its schema, and the table that rules enter.

A rule is a function `(Op) -> list[Strategy]`, entered under the ops it speaks for with `@rule(aten.mm, ...)`.
"All replicated" is always possible and never needs to be listed. A rule must be right for every shape it sees; it may
be incomplete (then tensors are gathered, which is correct, slower, and reported).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from plait.graph.ops import (  # their import registers our ops
    attention,
    batch_norm,
    beside,
    choice,
    ending,
    grouped,
    island,
    lstm,
    random,
    rnn,
)
from plait.nodes import arguments
from plait.program.place.placement import AxisShares, P, Placement, R, Shard, Strategy
from plait.torch_private import pytree
from plait.torch_private.ops import schema_of

aten = torch.ops.aten
ours = torch.ops.plait
REGISTERED = (attention, batch_norm, beside, choice, ending, grouped, island, lstm, random, rnn)
"""The modules whose ops are in `ours`."""


@dataclass
class Op:
    """One node with its arguments bound to the names of its schema."""

    node: fx.Node
    axis: AxisShares
    outers: frozenset[int] = frozenset()
    """The `outer` of the shards that come in, where it is not 1."""

    @cached_property
    def tensors(self) -> list[fx.Node]:
        """Tensor arguments in flattened order, repeats included."""
        return arguments(self.node)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensor arguments."""
        return [shape_of(tensor) for tensor in self.tensors]

    @cached_property
    def outputs(self) -> list[tuple[int, ...]]:
        """Shapes of the output tensors; () for outputs that are absent."""
        value = self.node.meta["val"]
        if isinstance(value, torch.Tensor):
            return [tuple(value.shape)]
        return [tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in value]

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the only output."""
        return self.outputs[0]

    @cached_property
    def _bound(self) -> dict[str, Any]:
        schema = schema_of(self.node.target)
        bound = {argument.name: argument.default_value for argument in schema.arguments}
        bound |= dict(zip((argument.name for argument in schema.arguments), self.node.args, strict=False))
        return bound | dict(self.node.kwargs)

    def arg(self, name: str) -> Any:
        """An argument by its schema name, defaults filled in."""
        return self._bound[name]

    def dim(self, name: str = "dim") -> int:
        """A dim argument counted from the front, relative to the first tensor."""
        return int(self.arg(name)) % max(len(self.shapes[0]), 1)

    def same(self, placement: Placement) -> Strategy:
        """The same placement for all tensors, in and out."""
        return Strategy((placement,) * len(self.tensors), (placement,) * len(self.outputs))

    def by_name(self, outputs: Sequence[Placement], /, **inputs: Placement) -> Strategy:
        """Placements for tensor arguments by schema name; those not named are replicated."""
        placements: list[Placement] = []
        for name, value in self._bound.items():
            wanted = inputs.get(name, R)
            leaves = pytree.tree_leaves(value)
            placements += [wanted for leaf in leaves if isinstance(leaf, fx.Node)]
        return Strategy(tuple(placements), tuple(outputs))


PlacementRule = Callable[[Op], list[Strategy]]
_TABLE: dict[Any, PlacementRule] = {}
_LISTS_OUTERS: set[PlacementRule] = set()
_FURTHER: dict[Any, list[PlacementRule]] = {}


def rule(*targets: Any, outers: bool = False) -> Callable[[PlacementRule], PlacementRule]:
    """Enter a rule for op packets (all overloads) or single overloads.

    `outers`: the rule lists shards with outer parts itself; all others hold for each part as for the whole.
    """

    def enter(function: PlacementRule) -> PlacementRule:
        for target in targets:
            _TABLE[target] = function
        if outers:
            _LISTS_OUTERS.add(function)
        return function

    return enter


def lists_outers(function: PlacementRule | None) -> bool:
    """Whether a rule lists the shards with outer parts itself."""
    return function in _LISTS_OUTERS


def further(*targets: Any) -> Callable[[PlacementRule], PlacementRule]:
    """Enter strategies of op packets beside those of their rule; none of them holds for outer parts."""

    def enter(function: PlacementRule) -> PlacementRule:
        for target in targets:
            _FURTHER.setdefault(target, []).append(function)
        return function

    return enter


def further_rules(target: Any) -> list[PlacementRule]:
    """What was entered beside the rule of an op."""
    return _FURTHER.get(getattr(target, "overloadpacket", None), [])


def find_rule(target: Any) -> PlacementRule | None:
    """The rule of an op: its own, that of its packet, or the one for pointwise ops."""
    packet = getattr(target, "overloadpacket", None)
    found = _TABLE.get(target) or _TABLE.get(packet)
    if found is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return _TABLE["pointwise"]
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's (only) tensor."""
    return tuple(node.meta["val"].shape)


def can_be_sum(op: Op) -> bool:
    """Whether the output may be a sum over ranks: numbers may, masks not."""
    return op.node.meta["val"].dtype != torch.bool  # type: ignore[no-any-return]


def shards(ndim: int, *, skip: Sequence[int] = ()) -> list[int]:
    """The dims of a tensor, without some."""
    return [dim for dim in range(ndim) if dim not in skip]


__all__ = [
    "AxisShares",
    "Op",
    "P",
    "Placement",
    "PlacementRule",
    "R",
    "Shard",
    "Strategy",
    "aten",
    "can_be_sum",
    "find_rule",
    "further",
    "further_rules",
    "lists_outers",
    "ours",
    "rule",
    "shape_of",
    "shards",
]
