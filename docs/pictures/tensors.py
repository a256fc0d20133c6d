"""A matrix as all ranks hold it: rectangles of elements, from placements or from parts of flat tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.program.place.placement import AxisShares, Partial, Placement, Shard

Rectangle = tuple[int, int, int, int]
"""First row, first column, rows, columns."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix as all ranks hold it."""

    name: str
    shape: tuple[int, int]
    """Rows and columns; dims before them, of extent 1 here, are left out."""
    pieces: tuple[tuple[Rectangle, ...], ...]
    """What each rank has."""
    is_sum: bool
    """Whether what each rank has is a summand."""
    text: str
    """Its placements, of the axes with several ranks."""
    edges: tuple[tuple[Rectangle, ...], ...] = ()
    """What each rank was given by its neighbours."""


def placed_tensor(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    axes: Sequence[AxisShares],
    places: Sequence[Sequence[int]],
) -> Tensor:
    """A tensor under placements, one per axis; `places` are the coordinates of the ranks."""
    moved = 2 - len(shape)
    rows, columns = (*(1,) * moved, *shape)[-2:]
    several = [(p, axis) for p, axis in zip(placements, axes, strict=True) if axis.size > 1]
    return Tensor(
        name=name,
        shape=(rows, columns),
        pieces=tuple((_region((rows, columns), moved, placements, axes, place),) for place in places),
        is_sum=any(isinstance(p, Partial) for p, _ in several),
        text=" ".join(drawn(p, moved) for p, _ in several),
    )


def flat_tensor(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """The tensor of whose elements, row by row, each rank has those from one number to another."""
    pieces = tuple(_rows_of(low, high, tensor.shape[1]) for low, high in spans)
    return replace(tensor, pieces=pieces, is_sum=False, text="part")


def with_edges(tensor: Tensor, before: int, after: int) -> Tensor:
    """The tensor, cut by columns, with so many columns of the neighbours'."""
    edges = []
    for ((row, column, rows, columns),) in tensor.pieces:
        left = min(before, column)
        right = min(after, tensor.shape[1] - column - columns)
        found = [(row, column - left, rows, left), (row, column + columns, rows, right)]
        edges.append(tuple(rectangle for rectangle in found if rectangle[3]))
    return replace(tensor, edges=tuple(edges))


def drawn(placement: Placement, moved: int) -> str:
    """A placement with the dims of the matrix that is drawn."""
    return str(Shard(placement.dim + moved, placement.outer) if isinstance(placement, Shard) else placement)


def _region(
    shape: tuple[int, int],
    moved: int,
    placements: Sequence[Placement],
    axes: Sequence[AxisShares],
    place: Sequence[int],
) -> Rectangle:
    """What a rank has."""
    start, extent = [0, 0], list(shape)
    for placement, axis, at in zip(placements, axes, place, strict=True):
        if isinstance(placement, Shard) and axis.size > 1 and placement.dim + moved >= 0:
            dim = placement.dim + moved
            per_unit = extent[dim] // axis.total
            start[dim] += axis.offset(at) * per_unit
            extent[dim] = axis.units[at] * per_unit
    return start[0], start[1], extent[0], extent[1]


def _rows_of(low: int, high: int, width: int) -> tuple[Rectangle, ...]:
    """The rectangles of consecutive elements."""
    found: list[Rectangle] = []
    while low < high:
        row, column = divmod(low, width)
        rows = (high - low) // width if column == 0 else 0
        taken = (row, 0, rows, width) if rows else (row, column, 1, min(high, (row + 1) * width) - low)
        found.append(taken)
        low += taken[2] * taken[3]
    return tuple(found)
