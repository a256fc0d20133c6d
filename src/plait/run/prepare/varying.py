"""The programs of steps that are cut alike but whose batches vary in shape.

In: the shapes of a step's micro-batches. Out: one program that follows all of them, learned from a few that are
compiled for sizes of their own; where the model does not allow it, a program for each shape, of which the latest are
kept, and a reason for the user.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Protocol

from plait.errors import CaptureError, JobError, PlanError
from plait.latest import Latest
from plait.program.program import Program, RankProgram
from plait.program.sizes.alike import NotAlikeError, unify
from plait.program.sizes.form import Point, Range
from plait.program.sizes.space import Shapes, Space, corners, points_of, space_of

_KEPT = 8
"""Programs of single shapes that are kept."""
_OBSERVED = 64
"""Shapes from which ties between dims are read."""
_MOST_POINTS = 24
"""Programs that are compiled to learn from, at most."""
_MOST_FAILURES = 4
"""Attempts to stretch a program to further sizes that may fail before no more are made."""


class Build(Protocol):
    """Compiles a step."""

    def __call__(self, shapes: Sequence[Shapes], *, varies: bool) -> Program:
        """Micro-batches of these shapes; `varies`: those of other ranks and steps may have others."""


class Varying:
    """Programs of one way to cut a step."""

    def __init__(
        self,
        build: Build,
        num_micro: int,
        seen: Sequence[Shapes],
        allowed: Callable[[], None],
        simplify: Callable[[], bool],
    ) -> None:
        """`simplify`: let `build` choose less by the sizes of a step; whether it does anything else from then on."""
        self._build, self._num_micro, self._allowed, self._simplify = build, num_micro, allowed, simplify
        self._observed: list[Shapes] = list(dict.fromkeys(seen))
        self.varies = len(self._observed) > 1
        self.space: Space | None = None
        self._program: Program | None = None
        """For all shapes of the space."""
        self._learned: dict[Point, Program] = {}
        self._single = Latest[tuple[Shapes, ...], Program](_KEPT)
        self._failures = 0
        self.num_single = 0
        """Programs that were compiled for one shape alone."""
        self.reason: str | None = None
        """Why there is no program for all shapes, or not for these."""

    def of(self, shapes: tuple[Shapes, ...]) -> Program:
        """The program for micro-batches of these shapes."""
        if shapes and self._serves(shapes):
            assert self._program is not None
            return self._program
        known = self._single.get(shapes)
        if known is not None or not shapes:
            return known or self._one(shapes)
        new = [entry for entry in dict.fromkeys(shapes) if entry not in self._observed]
        if new and (self._observed or len(new) > 1):
            if not self.varies:
                self._allowed()
            self.varies = True
        self._observed = [*self._observed, *new][-_OBSERVED:]
        if self.varies and self._failures < _MOST_FAILURES:
            self._learn()
            if self._serves(shapes):
                assert self._program is not None
                return self._program
        return self._one(shapes)

    def any(self) -> Program | None:
        """Some program, of steps whose programs do not depend on shapes."""
        return next((self._single.get(key) for key in self._single), None)

    def _one(self, shapes: tuple[Shapes, ...]) -> Program:
        program = self._build(shapes, varies=self.varies)
        self._single.put(shapes, program)
        self.num_single += 1
        return program

    def _serves(self, shapes: Sequence[Shapes]) -> bool:
        space = self.space
        if self._program is None or space is None:
            return False
        for entry in dict.fromkeys(shapes):
            point = space.point(entry)
            if point is None or any(
                size not in sizes for size, sizes in zip(point, space.domain, strict=True)
            ):
                return False
        return True

    def _learn(self) -> None:
        """Find a program for all shapes so far, and somewhat beyond."""
        space = space_of(self._observed)
        if space is None:
            self.reason, self._failures = "batches differ by more than extents", _MOST_FAILURES
            return
        if self.space is not None and self.space.readers == space.readers and self._program is not None:
            space = space.with_domain(
                [_around(old, sizes) for old, sizes in zip(self.space.domain, space.domain, strict=True)]
            )
            points = corners(space)
        else:
            self._learned.clear()
            self._program = self.space = None
            points = points_of(space)
        if self._fits(space, points):
            further = space.with_domain([_stretched(sizes) for sizes in space.domain])
            reason = self.reason
            if not self._fits(further, corners(further)[:1]):
                self.reason = reason
            return
        if self._program is None and self._simplify():
            self._learned.clear()
            self._learn()
            return
        self._failures = self._failures + 1 if self._program is not None else _MOST_FAILURES

    def _fits(self, space: Space, points: Sequence[Point]) -> bool:
        """Whether one program serves the space; it is kept then."""
        before = dict(self._learned)
        try:
            self._program, self.space = self._fit(space, points), space
        except NotAlikeError as error:
            self.reason = str(error)
        except (CaptureError, JobError, PlanError) as error:
            self.reason = error.what
        else:
            self.reason = None
            return True
        self._learned = before
        return False

    def _fit(self, space: Space, wanted: Sequence[Point]) -> Program:
        points = list(dict.fromkeys((*self._learned, *wanted)))
        while len(points) <= _MOST_POINTS:
            for point in points:
                if point not in self._learned:
                    shapes = space.at(point)
                    if shapes is None:
                        raise NotAlikeError("dims that follow each other do not take all sizes")
                    program = self._build((shapes,) * self._num_micro, varies=True)
                    self._learned[point] = program if not self._learned else _light(program)
            found = unify([self._learned[p] for p in points], points, space.readers, space.domain)
            if isinstance(found, Program):
                return found
            points.append(found.point)
        raise NotAlikeError(f"{len(points)} sizes do not tell what the numbers depend on")


def _around(old: Range, sizes: Range) -> Range:
    """The sizes of both."""
    low, high = min(old.low, sizes.low), max(old.high, sizes.high)
    return Range(low, high, gcd(old.step, sizes.step, old.low - low, sizes.low - low) or 1)


def _stretched(sizes: Range) -> Range:
    """Somewhat further than what was seen, so that a record does not need another look."""
    more = max((sizes.high - sizes.low) // (4 * sizes.step), 1) * sizes.step
    return Range(sizes.low, sizes.high + more, sizes.step)


def _light(program: Program) -> Program:
    """Without what only people and the cost model ask for."""

    def light(entry: RankProgram) -> RankProgram:
        segments = {name: replace(segment, nodes=()) for name, segment in entry.segments.items()}
        return replace(entry, segments=segments)

    return replace(program, classes=tuple(light(entry) for entry in program.classes))
