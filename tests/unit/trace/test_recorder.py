"""The recorder: cheap, bounded, and its sums are those of the spans."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.trace import Recorder, clock_offset_ns, read_trace
from plait.trace.span import KINDS, Trace

MS = 1_000_000


def recorder(rank: int = 0, **options: int) -> Recorder:
    made = Recorder(rank, **{"offset_ns": 0, **options})
    made.describe(0, "forward", "forward", "compute", micro_batch=1, stage=2)
    made.describe(1, "wait", "wait")
    made.describe(2, "communication", "all-reduce", "communication", num_bytes=100)
    made.describe(3, "data", "prefetch", "data")
    return made


def run_steps(target: Recorder, num_steps: int) -> None:
    """Steps of 10 ms: 6 ms forward, 3 ms wait, 1 ms nothing; 5 ms of communication, 2 ms of it hidden."""
    for step in range(num_steps):
        start = step * 10 * MS
        target.record(step, 0, start, start + 6 * MS)
        target.record(step, 1, start + 6 * MS, start + 9 * MS)
        target.record(step, 2, start + 4 * MS, start + 9 * MS)
        target.record(step, 3, start + 1 * MS, start + 3 * MS)


def flushed(target: Recorder, folder: Path) -> Trace:
    target.flush(folder / "trace" / f"rank{target.rank}.json")
    return read_trace(folder)


def test_a_span_carries_what_was_described(tmp_path: Path) -> None:
    target = recorder(rank=3)
    target.record(5, 0, 1000, 4000)
    trace = flushed(target, tmp_path)
    (span,) = trace.spans
    assert (span.rank, span.step, span.instruction, span.kind, span.lane) == (3, 5, 0, "forward", "compute")
    assert (span.micro_batch, span.stage, span.num_bytes) == (1, 2, 0)
    assert span.duration_s == pytest.approx(3e-6)
    assert trace.ranks == (3,)


def test_first_and_latest_steps_are_kept_and_sums_cover_all(tmp_path: Path) -> None:
    target = recorder(first_steps=2, recent_steps=3)
    run_steps(target, 100)
    trace = flushed(target, tmp_path)
    assert trace.steps == (0, 1, 97, 98, 99)
    assert len(trace.spans) == 5 * 4
    (totals,) = trace.totals
    assert totals.num_steps == 99
    assert totals.compute_s["forward"] == pytest.approx(99 * 6e-3)
    assert totals.compute_s["wait"] == pytest.approx(99 * 3e-3)
    assert totals.communication_s == pytest.approx(99 * 5e-3)
    assert totals.background_s == pytest.approx(99 * 2e-3)
    assert totals.wall_s == pytest.approx(99 * 10e-3)
    assert totals.num_bytes == 99 * 100


def test_memory_is_bounded_by_capacity(tmp_path: Path) -> None:
    target = recorder(capacity=30, first_steps=2, recent_steps=50)
    run_steps(target, 1000)
    trace = flushed(target, tmp_path)
    assert len(trace.spans) <= 30
    assert trace.steps[:2] == (0, 1)
    assert trace.steps[-1] == 999


def test_a_rank_that_stays_in_one_step_is_bounded_too(tmp_path: Path) -> None:
    target = recorder(capacity=1000, first_steps=1, recent_steps=1)
    for index in range(120_000):
        target.record(0, 0, index * 10, index * 10 + 5)
    assert len(flushed(target, tmp_path).spans) <= 1000


def test_a_late_span_does_not_count_its_step_twice(tmp_path: Path) -> None:
    target = recorder()
    for step in range(4):
        target.record(step, 0, step * 10 * MS, step * 10 * MS + MS)
    target.record(2, 2, 25 * MS, 33 * MS)
    target.record(3, 1, 33 * MS, 34 * MS)
    trace = flushed(target, tmp_path)
    assert trace.totals[0].num_steps == 3
    assert len(trace.spans) == 6


def test_flush_may_be_repeated(tmp_path: Path) -> None:
    target = recorder()
    run_steps(target, 2)
    first = flushed(target, tmp_path)
    target.record(1, 0, 20 * MS, 21 * MS)
    second = flushed(target, tmp_path)
    assert (len(first.spans), len(second.spans)) == (8, 9)
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["rank0.json"]


def test_a_failed_flush_leaves_the_old_file(tmp_path: Path) -> None:
    target = recorder()
    run_steps(target, 2)
    before = flushed(target, tmp_path)
    with pytest.raises(TypeError):
        target.flush(tmp_path / "trace" / "rank0.json", metadata={"not JSON": object()})
    assert read_trace(tmp_path) == before
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["rank0.json"]


def test_an_instruction_nobody_described_is_named() -> None:
    target = recorder()
    target.record(0, 99, 0, 1)
    with pytest.raises(ValueError, match="instruction 99 of rank 0 was never described"):
        target.record(1, 0, 1, 2)


def test_unknown_kinds_lanes_and_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="kind 'sleep'"):
        recorder().describe(9, "sleep", "x", "compute")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lane 'gpu'"):
        recorder().describe(9, "data", "x", "gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity=0"):
        Recorder(0, capacity=0)


def test_ranks_of_one_host_share_their_clock(tmp_path: Path) -> None:
    offset_ns = clock_offset_ns()
    for rank in (0, 1):
        target = recorder(rank, offset_ns=offset_ns)
        target.record(0, 0, 5 * MS + rank * MS, 9 * MS)
        target.flush(tmp_path / "trace" / f"rank{rank}.json")
    starts = [span.start_s for span in read_trace(tmp_path).spans]
    assert starts == pytest.approx([0.0, 1e-3], abs=1e-12)


def test_the_offset_takes_the_counter_to_the_epoch() -> None:
    assert abs(time.perf_counter_ns() + clock_offset_ns() - time.time_ns()) < 1000 * MS


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), min_size=1), max_size=9
    )
)
def test_parts_never_exceed_the_whole(tmp_path: Path, steps: list[list[tuple[int, int, int]]]) -> None:
    target = recorder()
    clock = 1
    for step, spans in enumerate(steps):
        target.record(step, 0, clock, clock + 1)
        clock += 1
        for instruction, wait, length in spans:
            target.record(step, instruction, clock + wait, clock + wait + length)
            clock += length
    trace = flushed(target, tmp_path)
    for totals in trace.totals:
        assert set(totals.compute_s) == set(KINDS)
        assert sum(totals.compute_s.values()) <= totals.wall_s + 1e-15


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    target = recorder()
    run_steps(target, 3)
    target.flush(tmp_path / "rank0.json", metadata={"plan": "ddp"})
    document = json.loads((tmp_path / "rank0.json").read_text())
    assert document["format"] == "plait-trace"
    assert document["metadata"] == {"plan": "ddp"}
    assert document["instructions"][0] == [0, "forward", "forward", "compute", 1, 2, 0]
    assert document["spans"][0] == [0, 0, 0, 6 * MS]
