"""Turn a local tensor from some placements into others: the communication of a local graph.

In: a local node, the global shape, placements before and after (one per axis). Out: the local node under the new
placements. What needs no communication is done first, so that less is sent; sums go straight to the shard that is
wanted (reduce-scatter) where the shards allow it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import fx

from plait.program.local.communicate import (
    all_gather,
    all_reduce,
    merge_dims,
    reduce_scatter,
    split_dim,
    take_shard,
)
from plait.program.local.functions import weighted_share
from plait.program.place.placement import AxisShares, Partial, Placement, R, Replicate, Shard, overlaps


class Writer(Protocol):
    """What a conversion may ask of the graph under construction."""

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...

    def offset(self, axis: str) -> fx.Node: ...


class Conversion:
    """One tensor on its way from its placements to others."""

    def __init__(
        self,
        writer: Writer,
        shape: Sequence[int],
        axes: Sequence[AxisShares],
        coordinates: Sequence[int],
        have: Sequence[Placement],
    ) -> None:
        self.writer = writer
        self.shape = tuple(shape)
        self.axes = tuple(axes)
        self.coordinates = tuple(coordinates)
        self.now = list(have)

    def to(self, value: fx.Node, want: Sequence[Placement]) -> fx.Node:
        """The node under the placements `want`."""
        for take in (self._take_shards, self._meet, self._take_shards, self._share):
            for index, wanted in enumerate(want):
                if self.axes[index].size == 1:
                    self.now[index] = wanted
                elif self.now[index] != wanted:
                    value = take(value, index, wanted)
        assert list(want) == self.now, f"{want} was not reached from {self.now}"
        return value

    def _take_shards(self, value: fx.Node, index: int, wanted: Placement) -> fx.Node:
        if (
            isinstance(self.now[index], Replicate)
            and isinstance(wanted, Shard)
            and self._is_free(index, wanted)
        ):
            value = self._shard(value, index, wanted)
            self.now[index] = wanted
        return value

    def _meet(self, value: fx.Node, index: int, wanted: Placement) -> fx.Node:
        now, axis = self.now[index], self.axes[index]
        if isinstance(now, Partial):
            if isinstance(wanted, Shard) and self._is_free(index, wanted):
                value = self._on_slices(value, index, wanted, self._reduce_scatter)
                self.now[index] = wanted
            else:
                value = self.writer.emit(all_reduce, value, axis.name)
                self.now[index] = R
        elif isinstance(now, Shard):
            value = self._on_slices(value, index, now, self._all_gather)
            self.now[index] = R
        return value

    def _share(self, value: fx.Node, index: int, wanted: Placement) -> fx.Node:
        assert isinstance(self.now[index], Replicate) and isinstance(wanted, Partial)
        self.now[index] = wanted
        return self.writer.emit(weighted_share, value, 1.0 / self.axes[index].size)

    def _is_free(self, index: int, wanted: Placement) -> bool:
        return not any(
            overlaps(wanted, self.axes[index], other, axis)
            for i, (other, axis) in enumerate(zip(self.now, self.axes, strict=True))
            if i != index and axis.size > 1
        )

    def _shard(self, value: fx.Node, index: int, wanted: Shard) -> fx.Node:
        axis, coordinate = self.axes[index], self.coordinates[index]

        def take(part: fx.Node, i: int, dim: int, per_unit: int) -> fx.Node:
            own = axis.units[coordinate] * per_unit
            return self.writer.emit(take_shard, part, dim, own, per_unit, self.writer.offset(axis.name))

        return self._on_slices(value, index, wanted, take)

    def _all_gather(self, value: fx.Node, index: int, dim: int, per_unit: int) -> fx.Node:
        axis = self.axes[index]
        extents = [units * per_unit for units in axis.units]
        return self.writer.emit(all_gather, value, axis.name, dim, extents)

    def _reduce_scatter(self, value: fx.Node, index: int, dim: int, per_unit: int) -> fx.Node:
        axis = self.axes[index]
        extents = [units * per_unit for units in axis.units]
        own = extents[self.coordinates[index]]
        return self.writer.emit(reduce_scatter, value, axis.name, dim, extents, own)

    def _on_slices(self, value: fx.Node, index: int, shard: Shard, act: Any) -> fx.Node:
        """Act on the dim that is cut, taken apart from the outer parts that hold it."""
        outer, per_unit = self._outer(index, shard), self._per_unit(index, shard)
        if shard.outer == 1:
            return act(value, index, shard.dim, per_unit)  # type: ignore[no-any-return]
        axis = self.axes[index]
        units = axis.units[self.coordinates[index]] if self.now[index] == shard else axis.total
        inner = value.meta["val"].shape[shard.dim] // outer if outer else units * per_unit
        parts = self.writer.emit(split_dim, value, shard.dim, outer, inner)
        return self.writer.emit(merge_dims, act(parts, index, shard.dim + 1, per_unit), shard.dim)

    def _outer(self, index: int, shard: Shard) -> int:
        """The outer parts that this rank has: other axes may cut them."""
        outer = shard.outer
        for other, axis, coordinate in self._beside(index):
            if other.dim == shard.dim and other.outer < shard.outer:
                outer = axis.local(outer, coordinate)
        return outer

    def _per_unit(self, index: int, shard: Shard) -> int:
        """Extent of one unit on this rank: other axes may cut inside of it."""
        extent = self.shape[shard.dim] // max(shard.outer * self.axes[index].total, 1)
        for other, axis, coordinate in self._beside(index):
            if other.dim == shard.dim and other.outer > shard.outer:
                extent = axis.local(extent, coordinate)
        return extent

    def _beside(self, index: int) -> list[tuple[Shard, AxisShares, int]]:
        found = zip(self.now, self.axes, self.coordinates, strict=True)
        return [
            (now, axis, coordinate)
            for i, (now, axis, coordinate) in enumerate(found)
            if i != index and isinstance(now, Shard) and axis.size > 1
        ]
