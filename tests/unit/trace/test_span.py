"""Spans and traces that make no sense cannot be built."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.trace.span import Span, Sweep, Trace, union_s


def span(**changes: Any) -> Span:
    fields: dict[str, Any] = {
        "rank": 0,
        "step": 1,
        "instruction": 7,
        "kind": "forward",
        "name": "forward",
        "lane": "compute",
        "start_s": 1.0,
        "end_s": 2.5,
    }
    return Span(**{**fields, **changes})


def test_duration() -> None:
    assert span().duration_s == 1.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "forwards"}, "kind 'forwards'"),
        ({"lane": "gpu"}, "lane 'gpu'"),
        ({"end_s": 0.5}, "before it starts"),
        ({"end_s": float("nan")}, "before it starts"),
        ({"num_bytes": -1}, "-1 bytes"),
    ],
)
def test_an_invalid_span_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        span(**changes)


def test_an_invalid_trace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks \[3\]"):
        Trace(spans=(span(rank=3),), ranks=(0, 1))
    with pytest.raises(ValueError, match="ascending"):
        Trace(spans=(), ranks=(1, 0))
    with pytest.raises(ValueError, match="measured or simulated"):
        Trace(spans=(), ranks=(), source="guessed")  # type: ignore[arg-type]


def test_steps_are_those_of_the_spans() -> None:
    assert Trace(spans=(span(step=4), span(step=2), span(step=4)), ranks=(0,)).steps == (2, 4)


def test_overlap_belongs_to_the_span_that_started_first() -> None:
    sweep = Sweep(0)
    assert [sweep.add(0, 5), sweep.add(2, 4), sweep.add(3, 8), sweep.add(10, 11)] == [5, 0, 3, 1]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_union_is_the_number_of_covered_moments(pairs: list[tuple[int, int]]) -> None:
    intervals = [(min(pair), max(pair)) for pair in pairs]
    covered = {moment for start, end in intervals for moment in range(start, end) if 10 <= moment < 50}
    assert union_s(intervals, after_s=10, before_s=50) == len(covered)
