"""Cuts of a row of units into stages: against trying them all."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.search.predict.between import Row, best_cut


def tried(row: Row, in_flight: list[float], limit: float) -> float | None:
    """The fastest slowest stage of all cuts that have room."""
    count, stages = len(row.seconds), len(in_flight)
    best: float | None = None
    for starts in combinations(range(1, count), stages - 1):
        parts = list(pairwise([0, *starts, count]))
        fits = all(
            sum(row.state_bytes[a:b]) + n * sum(row.kept_bytes[a:b]) <= limit
            for (a, b), n in zip(parts, in_flight, strict=True)
        )
        slowest = max(sum(row.seconds[a:b]) for a, b in parts)
        if fits and (best is None or slowest < best):
            best = slowest
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=2, max_size=8),
    st.integers(1, 4),
    st.integers(5, 80),
)
def test_cut_is_the_best_of_all(units: list[tuple[int, int, int]], stages: int, limit: int) -> None:
    seconds, state, kept = (tuple(map(float, column)) for column in zip(*units, strict=True))
    row = Row(seconds=seconds, state_bytes=state, kept_bytes=kept)
    in_flight = [float(stages - stage) for stage in range(stages)]
    found = best_cut(row, in_flight=in_flight, limit_bytes=limit)
    expected = tried(row, in_flight, limit)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.slowest_s == pytest.approx(expected)
        parts = list(pairwise([0, *found.starts, len(seconds)]))
        assert max(sum(seconds[a:b]) for a, b in parts) == pytest.approx(expected)


def test_even_costs_give_even_stages() -> None:
    row = Row(seconds=(0.1, *[1.0] * 8, 0.5), state_bytes=(0.0,) * 10, kept_bytes=(0.0,) * 10)
    found = best_cut(row, in_flight=[1.0] * 4, limit_bytes=1.0)
    assert found is not None
    assert found.starts == (3, 5, 7)


def test_a_cut_that_fills_all_memory_is_found() -> None:
    row = Row(seconds=(3.0, 1.0, 1.0, 1.0), state_bytes=(1.0,) * 4, kept_bytes=(0.0,) * 4)
    found = best_cut(row, in_flight=[1.0, 1.0], limit_bytes=2.0)
    assert found is not None and found.starts == (2,)
    assert best_cut(row, in_flight=[1.0, 1.0], limit_bytes=1.0) is None
    assert best_cut(row, in_flight=[1.0, 1.0], limit_bytes=2.0, virtual=2) is None
