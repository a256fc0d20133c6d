"""The parts of a step are right, and add up to it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.report.breakdown import PARTS, RankBreakdown, breakdown
from plait.trace import KINDS, LANES, Recorder, Span, Trace, read_trace


def span(kind: str, start_s: float, end_s: float, **changes: Any) -> Span:
    lane = "communication" if kind == "communication" else "compute"
    fields: dict[str, Any] = {
        "rank": 0,
        "step": 0,
        "instruction": 0,
        "kind": kind,
        "name": kind,
        "lane": lane,
    }
    return Span(**{**fields, "start_s": start_s, "end_s": end_s, **changes})


def adds_up(one: RankBreakdown) -> bool:
    return sum(getattr(one, part) for part in PARTS) == pytest.approx(one.step_s, rel=1e-9, abs=1e-12)


def test_a_step_written_by_hand() -> None:
    spans = (
        span("data", 0.0, 1.0),
        span("forward", 1.0, 3.0),
        span("backward", 3.0, 7.0),
        span("communication", 4.0, 8.0, num_bytes=10),
        span("communication", 5.0, 9.0, num_bytes=20),
        span("wait", 7.0, 9.0),
        span("update", 9.5, 10.0),
        span("checkpoint", 10.0, 12.0),
        span("data", 2.0, 6.0, lane="data"),
    )
    (one,) = breakdown(Trace(spans=spans, ranks=(0,)))
    assert (one.num_steps, one.step_s) == (1, 12.0)
    assert [getattr(one, part) for part in PARTS] == [1.0, 2.0, 4.0, 2.0, 0.5, 2.0, 0.5]
    assert one.hidden_communication_s == 3.0  # under way from 4 to 9, of which 2 were waited for
    assert one.background_s == 4.0
    assert one.communicated_bytes == 30
    assert one.share("backward_s") == pytest.approx(4 / 12)


def test_the_first_of_three_steps_is_warm_up() -> None:
    spans = [span("forward", 0.0, 100.0)]
    spans += [span("forward", 100.0 + step, 100.5 + step, step=step) for step in (1, 2, 3)]
    (one,) = breakdown(Trace(spans=tuple(spans), ranks=(0,)))
    assert one.num_steps == 3
    assert one.forward_s == pytest.approx(0.5)
    assert one.step_s == pytest.approx(3.5 / 3)
    (two,) = breakdown(Trace(spans=tuple(spans[:2]), ranks=(0,)))
    assert two.num_steps == 2
    assert two.forward_s == pytest.approx(50.25)


def test_time_between_steps_is_idle() -> None:
    spans = [span("forward", 10.0 * step, 10.0 * step + 4.0, step=step) for step in range(4)]
    (one,) = breakdown(Trace(spans=tuple(spans), ranks=(0,)))
    assert (one.step_s, one.forward_s, one.idle_s) == pytest.approx((10.0, 4.0, 6.0))


def test_the_bubbles_of_a_pipeline_are_idle_on_both_ends() -> None:
    """Two stages, one micro-batch: each stage idles while the other works."""
    spans = (
        span("forward", 0.0, 1.0),
        span("forward", 1.0, 2.0, rank=1),
        span("backward", 2.0, 4.0, rank=1),
        span("backward", 4.0, 6.0),
    )
    first, second = breakdown(Trace(spans=spans, ranks=(0, 1), source="simulated"))
    assert (first.step_s, first.idle_s) == (6.0, 3.0)
    assert (second.step_s, second.idle_s) == (6.0, 3.0)


def test_a_rank_that_ends_early_is_not_charged_for_the_others() -> None:
    """Asynchronous ranks run at their own pace, and clocks of two hosts differ."""
    spans = [
        span("forward", rank * 50.0 + step, rank * 50.0 + step + 1.0, step=step, rank=rank)
        for step in range(5)
        for rank in (0, 1)
    ]
    for one in breakdown(Trace(spans=tuple(spans), ranks=(0, 1))):
        assert (one.step_s, one.idle_s) == pytest.approx((1.0, 0.0))


def test_steps_that_were_not_kept_are_not_idle_time() -> None:
    kept = [0, 1, 500, 501]
    spans = [span("forward", 1.0 * step, step + 0.75, step=step) for step in kept]
    (one,) = breakdown(Trace(spans=tuple(spans), ranks=(0,)))
    assert one.step_s == pytest.approx((1.0 + 0.75 + 1.0) / 3)
    assert one.forward_s == pytest.approx(0.75)
    assert adds_up(one)


def test_a_collective_on_the_compute_lane_is_exposed() -> None:
    (one,) = breakdown(Trace(spans=(span("communication", 0.0, 2.0, lane="compute"),), ranks=(0,)))
    assert (one.exposed_communication_s, one.hidden_communication_s) == (2.0, 0.0)


def test_a_rank_without_spans_is_left_out() -> None:
    assert [one.rank for one in breakdown(Trace(spans=(span("forward", 0, 1, rank=2),), ranks=(0, 2)))] == [2]
    assert breakdown(Trace(spans=(), ranks=(0,))) == []


def recorded(folder: Path, **limits: int) -> Trace:
    recorder = Recorder(0, offset_ns=0, **limits)
    for index, kind in enumerate(KINDS):
        recorder.describe(
            index, kind, kind, "communication" if kind == "communication" else "compute", num_bytes=index
        )
    clock = 1000
    for step in range(40):
        for index in range(len(KINDS)):
            length = 1000 * (1 + (step * 7 + index * 3) % 11)
            recorder.record(step, index, clock, clock + length)
            clock += 0 if KINDS[index] == "communication" else length + 50
    recorder.flush(folder / "trace" / "rank0.json")
    return read_trace(folder)


def test_sums_of_a_long_run_equal_the_breakdown_of_all_its_spans(tmp_path: Path) -> None:
    (all_spans,) = breakdown(recorded(tmp_path / "all", first_steps=40))
    trace = recorded(tmp_path / "few", first_steps=1, recent_steps=2)
    assert len(trace.steps) == 3
    (from_sums,) = breakdown(trace)
    assert from_sums.as_dict() == pytest.approx(all_spans.as_dict(), rel=1e-6)
    assert from_sums.num_steps == 39


@st.composite
def any_trace(draw: st.DrawFn) -> Trace:
    spans = draw(
        st.lists(
            st.builds(
                lambda rank, step, kind, lane, start, length: span(
                    kind, start, start + length, rank=rank, step=step, lane=lane
                ),
                st.integers(0, 2),
                st.integers(0, 5),
                st.sampled_from(KINDS),
                st.sampled_from(LANES),
                st.floats(0, 100),
                st.floats(0, 20),
            ),
            max_size=40,
        )
    )
    return Trace(spans=tuple(spans), ranks=(0, 1, 2))


@settings(max_examples=150, deadline=None)
@given(any_trace())
def test_the_parts_add_up_to_the_step_whatever_the_spans(trace: Trace) -> None:
    for one in breakdown(trace):
        assert adds_up(one)
        assert all(getattr(one, part) >= 0 for part in PARTS)
        assert one.hidden_communication_s >= 0


@settings(max_examples=150, deadline=None)
@given(any_trace())
def test_the_order_of_the_spans_does_not_matter(trace: Trace) -> None:
    turned = Trace(spans=tuple(reversed(trace.spans)), ranks=trace.ranks)
    for one, other in zip(breakdown(trace), breakdown(turned), strict=True):
        assert one.as_dict() == pytest.approx(other.as_dict())
