"""Ops whose local form is not the same op on the local shards: the table, and what a lowering is given.

Entered with `@lower(op, ...)`: a function `(Site) -> fx.Node | list[fx.Node]` that writes the local form of one node,
with `site.emit` and `site.convert`. Everything else is written as the op itself, with the arguments' local shards.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from plait.program.local import functions as local
from plait.program.place.placement import AxisShares, Partial, Shard, Strategy
from plait.program.place.rules.base import ours
from plait.torch_private import pytree

Local = fx.Node | list[fx.Node]


class Writer(Protocol):
    """What a lowering may ask of the graph under construction."""

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...

    def once(self, target: Any, *args: Any) -> fx.Node: ...

    def local_shape(self, node: fx.Node, output: int = 0) -> list[int]: ...

    def offset(self, axis: str) -> fx.Node: ...


@dataclass(frozen=True, slots=True)
class Site:
    """One node to lower: the global node, its local arguments, and how it is cut on each axis."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writer: Writer
    axes: tuple[AxisShares, ...]
    coordinates: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    local_batch_norm: bool
    in_short: bool
    """Whether it is a product that the job wants in 8 bits."""
    in_short_gradient: bool
    """Whether it is the gradient of a weight that the job wants in 8 bits."""
    feeds: str | None
    """What its first factor is in such a gradient: "gradient" or "activation"."""

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new local node."""
        return self.writer.emit(target, *args, **kwargs)

    def once(self, target: Any, *args: Any) -> fx.Node:
        """A local node that is made once for all who want it."""
        return self.writer.once(target, *args)

    def same(self, *args: Any, **kwargs: Any) -> fx.Node:
        """The op itself with other arguments."""
        return self.emit(self.node.target, *args, **(kwargs or self.kwargs))

    def shape(self, output: int = 0) -> list[int]:
        """Local shape of an output."""
        return self.writer.local_shape(self.node, output)

    def offset(self, index: int) -> fx.Node:
        """The units before this rank's own along an axis: an integer that is known when the step runs."""
        return self.writer.offset(self.axes[index].name)

    def is_partial(self) -> bool:
        """Whether the output is a sum over ranks of some axis, made from shards."""
        return any(
            isinstance(s.outputs[0], Partial) and any(isinstance(p, Shard) for p in s.inputs)
            for s in self.strategies
        )

    def is_empty(self) -> bool:
        """Whether this rank has no units of an axis along which the op's inputs are cut."""
        return any(
            axis.size > 1
            and axis.units[coordinate] == 0
            and any(isinstance(p, Shard) for p in strategy.inputs)
            for axis, coordinate, strategy in zip(self.axes, self.coordinates, self.strategies, strict=True)
        )

    def nothing(self) -> Local:
        """What an op gives on an empty share: empty shards and zeros. Many of torch's kernels refuse or crash on it."""
        inputs = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, fx.Node)]
        value = self.node.meta["val"]
        if isinstance(value, torch.Tensor):
            return self.emit(local.nothing, inputs, self.shape(), value.dtype)
        shapes = [self.shape(i) if isinstance(entry, torch.Tensor) else [] for i, entry in enumerate(value)]
        dtypes = [entry.dtype if isinstance(entry, torch.Tensor) else None for entry in value]
        made = self.emit(
            local.nothings, inputs, shapes, dtypes
        )  # one node, as the op is: it reads its inputs once
        return [self.emit(operator.getitem, made, index) for index in range(len(shapes))]


Lowering = Callable[[Site], Local]
_TABLE: dict[Any, Lowering] = {}


_MEETS: set[Any] = {ours.batch_norm, ours.batch_norm_backward}
"""Ops that a rank with an empty share must run too: their local form communicates, or has something to add."""


def lower(*targets: Any, empty: bool = False) -> Callable[[Lowering], Lowering]:
    """Enter a lowering for op packets. `empty`: it is called for an empty share too."""

    def enter(function: Lowering) -> Lowering:
        for target in targets:
            _TABLE[target] = function
            if empty:
                _MEETS.add(target)
        return function

    return enter


def lower_node(site: Site) -> Local:
    """The local form of one node."""
    packet = getattr(site.node.target, "overloadpacket", None)
    special = _TABLE.get(packet)
    if site.is_empty() and packet not in _MEETS:
        return site.nothing()
    return special(site) if special is not None else site.same(*site.args)
