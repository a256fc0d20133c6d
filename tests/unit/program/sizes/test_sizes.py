"""Functions of sizes, found from examples; which dims vary together."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from plait.program.sizes.form import Form, MorePoints, Range, find
from plait.program.sizes.space import Shapes, points_of, space_of


def shapes_of(*extents: tuple[int, ...]) -> Shapes:
    return tuple((shape, torch.float32) for shape in extents)


def asked(function: Callable[..., int], points: list[Any], domain: Sequence[Range]) -> Form | None:
    """The form of a function, which is asked at further points until it is clear."""
    while isinstance(found := find(points, [function(*point) for point in points], domain), MorePoints):
        assert found.point not in points
        points.append(found.point)
    return found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 12,
        lambda x: x,
        lambda x: 6 * (x + 1),
        lambda x: 3 - 2 * x,
        lambda x: (x - 1) // 2 + 1,
        lambda x: 5 * ((x + 3) // 4) + 2,
        lambda x: (x + 31) // 32,
        lambda x: x * x,
        lambda x: 4 * (x + 1) * (x + 1) - 3,
    ],
)
def test_one_variable_is_found_by_asking_where_forms_differ(function) -> None:  # type: ignore[no-untyped-def]
    domain = [Range(5, 160, 1)]
    points = [(160,), (5,), (6,)]
    found = asked(function, points, domain)
    assert found is not None
    for x in range(5, 161):
        assert found((x,)) == function(x)
        assert eval(found.text(["x"]), {"x": x}) == function(x)
    assert len(points) < 16


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: x * y,
        lambda x, y, z: 4 * x * (y + 1) * z,
        lambda x, y, z: x + y + 2 * z - 3,
        lambda x, y, z: x * (y + z),
        lambda x, y, z: ((x + 1) // 2) * ((y + 1) // 2),
    ],
)
def test_several_variables(function) -> None:  # type: ignore[no-untyped-def]
    domain = [Range(2, 20, 1), Range(4, 30, 1), Range(3, 50, 1)]
    points = [
        (20, 30, 50),
        (2, 30, 50),
        (3, 30, 50),
        (20, 4, 50),
        (20, 5, 50),
        (20, 30, 3),
        (20, 30, 4),
        (2, 4, 3),
        (9, 12, 7),
    ]
    found = asked(function, points, domain)
    assert found is not None
    for point in [(2, 4, 3), (7, 11, 13), (20, 4, 50), (13, 29, 31)]:
        assert found(point) == function(*point)
        names = dict(zip("xyz", point, strict=True))
        assert eval(found.text(["x", "y", "z"]), names) == function(*point)


@pytest.mark.parametrize("function", [lambda x: x % 2, lambda x: min(x, 18), lambda x: x**3])
def test_numbers_that_no_form_gives_are_not_guessed(function) -> None:  # type: ignore[no-untyped-def]
    points = [(40,), (5,), (6,)]
    assert asked(function, points, [Range(5, 40, 1)]) is None
    assert len(points) < 12


def test_dims_that_vary_together_are_one_variable() -> None:
    seen = [shapes_of((0, n), (0, n - 1), (0, 2 * n, 7)) for n in (9, 12, 30)]
    space = space_of(seen)
    assert space is not None and len(space.variables) == 1
    assert space.domain == (Range(9, 30, 3),)
    assert space.point(seen[1]) == (12,)
    assert space.point(shapes_of((0, 15), (0, 14), (0, 30, 7))) == (15,)
    assert space.point(shapes_of((0, 15), (0, 15), (0, 30, 7))) is None, "untied"
    assert space.point(shapes_of((0, 15), (0, 14), (0, 30, 8))) is None, "was a constant"
    assert points_of(space) == [(30,), (9,), (12,)]


def test_dims_that_vary_apart_are_two() -> None:
    space = space_of([shapes_of((0, 9), (0, 4)), shapes_of((0, 12), (0, 5)), shapes_of((0, 1), (0, 6))])
    assert space is not None and space.domain == (Range(9, 12, 3), Range(4, 6, 1))
    assert points_of(space) == [(12, 6), (9, 6), (12, 4), (12, 5), (9, 4)]
    assert space_of([shapes_of((0, 9)), shapes_of((0, 9))]) is None
    assert space_of([shapes_of((0, 9)), shapes_of((0, 9, 1))]) is None
