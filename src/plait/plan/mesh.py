"""Ranks arranged along named axes.

In: axis names and sizes. Out: the coordinates of a rank and the ranks of a group. The last axis varies fastest.
"""

from dataclasses import dataclass
from math import prod

from plait.errors import PlanError

MAX_RANKS = 2**20
"""More than any machine has; a mesh of more is a mistake in writing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """A grid of ranks."""

    axes: tuple[tuple[str, int], ...]
    """(name, number of ranks) per axis, outermost first."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise PlanError(f"the mesh names an axis twice: {', '.join(names)}.", fix="give each axis once.")
        for name, size in self.axes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PlanError(
                    f"axis {name}={size} of the mesh is not a positive number.", fix=f"set {name}=1 or more."
                )
        if self.size > MAX_RANKS:
            raise PlanError(
                f"mesh {' x '.join(f'{name}={size}' for name, size in self.axes)} has {self.size:,} ranks.",
                fix=f"stay at or below {MAX_RANKS:,}.",
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank is on each axis."""
        found = []
        for _, size in reversed(self.axes):
            found.append(rank % size)
            rank //= size
        return tuple(reversed(found))

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank is on one axis; 0 where the mesh does not have it."""
        pairs = zip(self.axes, self.coordinates(rank), strict=True)
        return next((at for (name, _), at in pairs if name == axis), 0)

    def size_of(self, axis: str) -> int:
        """Ranks along an axis, or along several joined by `+`; 1 where the mesh does not have it."""
        sizes = dict(self.axes)
        return prod(sizes.get(name, 1) for name in axis.split("+"))

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` in `axis` (or several joined by `+`) alone, itself included, in order."""
        names = axis.split("+")
        own = self.coordinates(rank)
        strides = [prod(size for _, size in self.axes[i + 1 :]) for i in range(len(self.axes))]
        found = [0]
        for (name, size), stride, coordinate in zip(self.axes, strides, own, strict=True):
            choices = range(size) if name in names else (coordinate,)
            found = [base + stride * choice for base in found for choice in choices]
        return tuple(found)
