"""Which dims of a batch vary, and together with which others.

In: the shapes of several batches. Out: a `Space`: a few variables, each with the dims that follow it (equal to it but
for a constant, or a multiple of it) and the sizes that it takes. It never looks at more than shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

import torch

from plait.program.sizes.form import Point, Range

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors of a batch, in order."""

_SMALLEST = 2
"""Tensors of extent 1 are broadcast, squeezed and contiguous in ways that others are not."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A dim whose extent is `times` a variable's size `plus` a constant."""

    leaf: int
    dim: int
    times: Fraction
    plus: int

    def extent(self, size: int) -> int | None:
        """Of a size; None where it is no whole number."""
        value = self.times * size + self.plus
        return int(value) if value.denominator == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A size that varies."""

    followers: tuple[Follower, ...]
    """The dims that have it; the first one is equal to it."""
    sizes: Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """All shapes that a batch may have."""

    shapes: Shapes
    """Of some batch."""
    variables: tuple[Variable, ...]

    @property
    def domain(self) -> tuple[Range, ...]:
        """The sizes of each variable."""
        return tuple(variable.sizes for variable in self.variables)

    @property
    def readers(self) -> tuple[tuple[int, int], ...]:
        """(leaf, dim) from which the size of each variable is read."""
        return tuple((v.followers[0].leaf, v.followers[0].dim) for v in self.variables)

    def point(self, shapes: Shapes) -> Point | None:
        """The sizes of a batch; None where they are none of this space."""
        if len(shapes) != len(self.shapes):
            return None
        sizes = tuple(
            shapes[leaf][0][dim] if dim < len(shapes[leaf][0]) else -1 for leaf, dim in self.readers
        )
        return sizes if self.at(sizes) == shapes else None

    def at(self, point: Point) -> Shapes | None:
        """The shapes at a point; None where an extent would be no whole number."""
        found = [list(shape) for shape, _ in self.shapes]
        for variable, size in zip(self.variables, point, strict=True):
            for follower in variable.followers:
                extent = follower.extent(size)
                if extent is None or extent < 0:
                    return None
                found[follower.leaf][follower.dim] = extent
        return tuple((tuple(shape), dtype) for shape, (_, dtype) in zip(found, self.shapes, strict=True))

    def with_domain(self, domain: Sequence[Range]) -> "Space":
        """The same with other sizes."""
        pairs = zip(self.variables, domain, strict=True)
        return replace(self, variables=tuple(replace(v, sizes=sizes) for v, sizes in pairs))

    def told(self, names: Sequence[str]) -> str:
        """The variables and their sizes, for people."""
        parts = []
        for variable in self.variables:
            first, sizes = variable.followers[0], variable.sizes
            parts.append(f"{names[first.leaf]} dim {first.dim} from {sizes.low} to {sizes.high}")
        return ", ".join(parts)


def space_of(observed: Sequence[Shapes]) -> Space | None:
    """The space of batches like these; None where they do not vary, or differ by more than extents."""
    distinct = list(dict.fromkeys(observed))
    first = distinct[0]
    alike = [(dtype, len(shape)) for shape, dtype in first]
    if any([(dtype, len(shape)) for shape, dtype in shapes] != alike for shapes in distinct):
        return None
    groups: list[list[Follower]] = []
    columns: list[list[int]] = []
    for leaf, (shape, _) in enumerate(first):
        for dim in range(len(shape)):
            column = [shapes[leaf][0][dim] for shapes in distinct]
            if len(set(column)) == 1:
                continue
            for group, leader in zip(groups, columns, strict=True):
                tie = _tie(leader, column)
                if tie is not None:
                    group.append(Follower(leaf, dim, *tie))
                    break
            else:
                groups.append([Follower(leaf, dim, Fraction(1), 0)])
                columns.append(column)
    if not groups:
        return None
    variables = []
    for group, column in zip(groups, columns, strict=True):
        sizes = sorted({size for size in column if size >= _SMALLEST}) or [max(column)]
        step = gcd(*(size - sizes[0] for size in sizes)) or 1
        variables.append(Variable(followers=tuple(group), sizes=Range(sizes[0], sizes[-1], step)))
    return Space(shapes=first, variables=tuple(variables))


def _tie(leader: Sequence[int], column: Sequence[int]) -> tuple[Fraction, int] | None:
    """How a dim follows another one in all batches: a constant apart, or a multiple."""
    if len({b - a for a, b in zip(leader, column, strict=True)}) == 1:
        return Fraction(1), column[0] - leader[0]
    if 0 not in leader and len({Fraction(b, a) for a, b in zip(leader, column, strict=True)}) == 1:
        return Fraction(column[0], leader[0]), 0
    return None


def points_of(space: Space) -> list[Point]:
    """Where programs are compiled to learn from: the largest sizes first, then each variable by itself, then all."""
    top = tuple(sizes.high for sizes in space.domain)
    points = [top]
    for index, sizes in enumerate(space.domain):
        for size in (sizes.low, min(sizes.low + sizes.step, sizes.high)):
            points.append((*top[:index], size, *top[index + 1 :]))
    if len(top) > 1:
        points += [
            corners(space)[1],
            tuple(sizes.near((2 * sizes.low + sizes.high) // 3) for sizes in space.domain),
        ]
    return list(dict.fromkeys(points))


def corners(space: Space) -> list[Point]:
    """The largest sizes, and the smallest."""
    return [tuple(sizes.high for sizes in space.domain), tuple(sizes.low for sizes in space.domain)]
