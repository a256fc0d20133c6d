"""Where the parameters of a model are held: which shard of each, on which rank.

In: the shapes of parameters, their placements along mesh axes, groups that lie in one flat tensor cut over `data`.
Out: a rank's shard of a whole tensor, and the whole from all shards. Optimizer state lies like its parameter. It never
communicates: whoever assembles has fetched the shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, PIPE
from plait.program.place.placement import AxisShares, Placement, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that lie one after the other in a flat tensor, of which each rank of `data` holds an equal chunk."""

    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """As this rank's coordinates on the other axes leave them."""
    dtype: torch.dtype
    chunks: int
    """Ranks of `data`."""
    trained: bool
    """Whether gradients come back for them."""
    owners: tuple[int, ...] = (0,)
    """The coordinates on `pipe` that hold them."""
    whole: bool = False
    """Whether every parameter lies in one chunk: for optimizers that need all of a tensor. Chunks end in padding."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter starts in the flat tensor."""
        if self.whole:
            places, size = _whole_places(self.shapes, self.chunks)
            return tuple(chunk * size + offset for chunk, offset in places)
        return tuple(accumulate((prod(shape) for shape in self.shapes), initial=0))[:-1]

    @property
    def chunk_elements(self) -> int:
        """Elements that a rank holds; the last chunk may end in padding."""
        if self.whole:
            return _whole_places(self.shapes, self.chunks)[1]
        return -(-sum(prod(shape) for shape in self.shapes) // self.chunks)

    @property
    def num_elements(self) -> int:
        """Elements of the flat tensor, padding included."""
        return self.chunk_elements * self.chunks

    def span(self, index: int, chunk: int) -> tuple[int, int]:
        """(start, end) of a chunk's part of one parameter, counted in its own elements; empty where start == end."""
        start, size = self.starts[index], prod(self.shapes[index])
        first = chunk * self.chunk_elements - start
        low = min(max(first, 0), size)
        return low, min(max(first + self.chunk_elements, low), size)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in a whole flat tensor."""
        return [
            flat[start : start + prod(shape)].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def chunk_views(self, flat: Tensor, chunk: int) -> list[Tensor]:
        """Each parameter's part of one chunk, flat; where parameters are whole, in their shape."""
        base = chunk * self.chunk_elements
        found = []
        for index, start in enumerate(self.starts):
            low, high = self.span(index, chunk)
            part = flat[start + low - base : start + high - base] if high > low else flat[:0]
            found.append(part.view(self.shapes[index]) if self.whole and high > low else part)
        return found


@cache
def _whole_places(
    shapes: tuple[tuple[int, ...], ...], chunks: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """(chunk, offset) of each parameter, and the size of a chunk: the largest first, each to the emptiest chunk."""
    loads = [0] * chunks
    places = [(0, 0)] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -prod(shapes[index])):
        chunk = loads.index(min(loads))
        places[index] = (chunk, loads[chunk])
        loads[chunk] += prod(shapes[index])
    return tuple(places), max(loads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One parameter."""

    shape: tuple[int, ...]
    """Of the whole."""
    placements: tuple[Placement, ...]
    """Per mesh axis; on `data` always replicated: cutting over `data` is what groups are for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How every parameter is held."""

    mesh: Mesh
    axes: tuple[AxisShares, ...]
    """One per mesh axis."""
    parameters: Mapping[str, Held]
    groups: tuple[Group, ...] = ()
    """Empty: nothing is cut over `data`."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The coordinates on `pipe` that hold a parameter; empty: there is no pipeline, all hold all."""
    buffer_owners: Mapping[str, int] = field(default_factory=dict)
    """The coordinate on `pipe` that changes a buffer; buffers that nobody changes are absent."""
    starts: tuple[int, ...] = ()
    """Where the stages of a pipeline begin, counted in `ops`."""
    ops: tuple[str, ...] = ()
    """The forward ops of the micro-batch for which the pipeline was cut."""
    zero: int = 0
    """What is cut over `data`: 1 optimizer state, 2 gradients too, 3 parameters too."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds everything."""
        return not (self.groups or self.owners) and not any(self.cut_axes(name) for name in self.parameters)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank is on each of `axes`."""
        return tuple(self.mesh.coordinate(rank, axis.name) for axis in self.axes)

    def is_held(self, name: str, rank: int) -> bool:
        """Whether a rank's stages have a parameter at all."""
        return not self.owners or self.mesh.coordinate(rank, PIPE) in self.owners[name]

    @property
    def whole_tensors(self) -> bool:
        """Whether each parameter is updated by one rank of `data` alone."""
        return any(group.whole for group in self.groups)

    def is_updated(self, name: str, rank: int) -> bool:
        """Whether a rank's optimizer has a shard of a parameter."""
        if not self.is_held(name, rank) or not self.whole_tensors:
            return self.is_held(name, rank)
        group, index = self.place_of(name)
        low, high = group.span(index, self.mesh.coordinate(rank, DATA))
        return high > low

    def is_counted(self, name: str, rank: int, axes: Sequence[str]) -> bool:
        """Whether a rank's part counts in a sum over `axes`: of ranks that hold the same part, the first one's does."""
        if self.owners and self.mesh.coordinate(rank, PIPE) != self.owners[name][0]:
            return False
        same = [axis for axis in axes if axis not in self.cut_axes(name)]
        return all(self.mesh.coordinate(rank, axis) == 0 for axis in same)

    def cut_axes(self, name: str) -> tuple[str, ...]:
        """The axes whose ranks hold different shards of a parameter and of its gradient."""
        held = self.parameters[name]
        cut = [
            axis.name
            for axis, placement in zip(self.axes, held.placements, strict=True)
            if isinstance(placement, Shard) and axis.size > 1
        ]
        if self.groups:
            cut.insert(0, DATA)
        return (PIPE, *cut) if self.owners else tuple(cut)

    def place_of(self, name: str) -> tuple[Group, int]:
        """The group of a parameter, and its position there."""
        for group in self.groups:
            if name in group.parameters:
                return group, group.parameters.index(name)
        raise KeyError(name)

    def local_shape(self, name: str, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Shape of a rank's shard, before it is cut over `data`."""
        held = self.parameters[name]
        shape = list(held.shape)
        for placement, axis, coordinate in zip(held.placements, self.axes, coordinates, strict=True):
            if isinstance(placement, Shard):
                shape[placement.dim] = axis.local(shape[placement.dim], coordinate)
        return tuple(shape)

    def held_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        if not self.is_held(name, rank):
            return (0,)
        if not self.groups:
            return self.local_shape(name, self.coordinates(rank))
        group, index = self.place_of(name)
        low, high = group.span(index, self.mesh.coordinate(rank, DATA))
        return group.shapes[index] if group.whole and high > low else (high - low,)

    def local(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """A rank's shard of a tensor shaped like a parameter, before it is cut over `data`; it may share memory."""
        coordinates = self.coordinates(rank)
        return self._view(name, whole, coordinates).reshape(self.local_shape(name, coordinates))

    def take(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """What a rank holds of a tensor shaped like a parameter; it may share memory with the whole."""
        local = self.local(name, whole, rank)
        if not self.groups:
            return local
        group, index = self.place_of(name)
        low, high = group.span(index, self.mesh.coordinate(rank, DATA))
        return local if group.whole and high > low else local.reshape(-1)[low:high]

    def assemble(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """The whole from what every rank holds, in the order of ranks."""
        held = self.parameters[name]
        whole = next(p for r, p in enumerate(shards) if self.is_held(name, r)).new_empty(held.shape)
        for rank in range(self.mesh.size):
            first = self.owners[name][0] if self.owners else 0
            if self.mesh.coordinate(rank, DATA) != 0 or self.mesh.coordinate(rank, PIPE) != first:
                continue
            coordinates = self.coordinates(rank)
            shard = shards[rank]
            if self.groups:
                shard = torch.cat([shards[other].reshape(-1) for other in self.mesh.group(rank, DATA)])
            view = self._view(name, whole, coordinates)
            view.copy_(shard.reshape(view.shape))
        return whole

    def _view(self, name: str, whole: Tensor, coordinates: Sequence[int]) -> Tensor:
        """A rank's shard as a view of the whole, with the outer parts of a dim as a dim of their own."""
        held = self.parameters[name]
        view = whole
        shards = [
            (placement, axis, coordinate)
            for placement, axis, coordinate in zip(held.placements, self.axes, coordinates, strict=True)
            if isinstance(placement, Shard)
        ]
        for placement, axis, coordinate in sorted(shards, key=lambda entry: -entry[0].dim):
            inner = whole.shape[placement.dim] // placement.outer
            per_unit = inner // axis.total
            view = view.unflatten(placement.dim, (placement.outer, inner))  # type: ignore[no-untyped-call]
            view = view.narrow(
                placement.dim + 1, axis.offset(coordinate) * per_unit, axis.units[coordinate] * per_unit
            )
        return view
