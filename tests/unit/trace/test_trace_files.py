"""Traces survive their files; Chrome's format is what its viewers need; broken files are named."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.errors import PlaitError
from plait.trace import KINDS, LANES, Span, Trace, read_trace, write_chrome, write_trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any spans at all, overlapping ones too, on whole nanoseconds."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.integers(0, 3),
                st.sampled_from(KINDS),
                st.sampled_from(LANES),
                st.integers(0, 10**9),
                st.integers(0, 10**6),
                st.none() | st.integers(0, 7),
                st.text(max_size=5),
            ),
            max_size=25,
        )
    )
    spans = [
        Span(
            rank=rank,
            step=step,
            instruction=index,
            kind=kind,
            name=name,
            lane=lane,
            start_s=start * 1e-9,
            end_s=(start + length) * 1e-9,
            micro_batch=micro_batch,
            stage=micro_batch,
            num_bytes=length,
        )
        for index, (rank, step, kind, lane, start, length, micro_batch, name) in enumerate(rows)
    ]
    return Trace(spans=tuple(spans), ranks=(0, 1, 2), source="simulated", metadata={"plan": "ddp"})


FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(traces())
def test_what_is_written_is_read_back(tmp_path: Path, trace: Trace) -> None:
    write_trace(trace, tmp_path)
    back = read_trace(tmp_path)
    assert (back.ranks, back.source, back.metadata["plan"]) == (trace.ranks, "simulated", "ddp")
    origin_ns = back.metadata["origin_ns"]

    def key(span: Span, shift_ns: int) -> tuple[Any, ...]:
        start, end = round(span.start_s * 1e9) + shift_ns, round(span.end_s * 1e9) + shift_ns
        described = (span.instruction, span.rank, span.step, span.kind, span.name, span.lane)
        return (*described, start, end, span.micro_batch, span.stage, span.num_bytes)

    assert sorted(key(span, origin_ns) for span in back.spans) == sorted(key(span, 0) for span in trace.spans)


@FUZZ
@given(traces())
def test_chrome_events_are_complete_and_those_of_a_thread_do_not_cross(tmp_path: Path, trace: Trace) -> None:
    write_chrome(trace, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(trace.spans)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in complete:
        start = round(event["ts"] * 1000)
        threads[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    assert set(threads) <= named
    for intervals in threads.values():
        intervals.sort()
        for (_, end), (start, _) in pairwise(intervals):
            assert end <= start


def span(**changes: Any) -> Span:
    fields: dict[str, Any] = {
        "rank": 0,
        "step": 4,
        "instruction": 2,
        "kind": "communication",
        "name": "all-reduce",
    }
    fields |= {"lane": "communication", "start_s": 1e-3, "end_s": 3e-3, "micro_batch": 1, "num_bytes": 64}
    return Span(**{**fields, **changes})


def test_chrome_names_ranks_and_lanes_and_counts_in_microseconds(tmp_path: Path) -> None:
    trace = Trace(spans=(span(), span(rank=1, start_s=2e-3), span(start_s=2e-3)), ranks=(0, 1))
    write_chrome(trace, tmp_path / "deep" / "trace.json")
    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    threads = [
        event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0
    ]
    assert threads == ["communication", "communication 2"]
    first = next(event for event in events if event["ph"] == "X")
    assert (first["ts"], first["dur"], first["cat"]) == (1000.0, 2000.0, "communication")
    assert first["args"] == {"step": 4, "instruction": 2, "micro_batch": 1, "bytes": 64}


def test_no_trace_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"holds no rank<k>\.json") as caught:
        read_trace(tmp_path)
    assert caught.value.fix is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": "plait-tr', "not JSON: Input data was truncated"),
        ("[]", "expected a trace, a table; it holds a list"),
        ('{"format": "plait-trace",\n "version": 99}', "line 2: version=99: expected one of 1"),
        ('{"format": "plait-trace", "version": 1}', "`rank` is missing"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    write_trace(Trace(spans=(span(),), ranks=(0, 1)), tmp_path)
    (tmp_path / "trace" / "rank1.json").write_text(text)
    with pytest.raises(PlaitError, match=words) as caught:
        read_trace(tmp_path)
    assert "rank1.json" in caught.value.what


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("spans", [[0, 5, 0, 1]], "a span is of instruction 5; there are 1"),
        ("spans", [[0, -1, 0, 1]], "a span is of instruction -1"),
        ("spans", [[0, 0, 0]], r"spans\[0\]=a list: expected a list of length 4"),
        ("spans", [[0, 0, 0, -5]], "before it starts"),
        ("spans", 3, "spans=3: expected a list"),
        ("instructions", [[1, 2]], r"instructions\[0\]"),
        ("origin_ns", "soon", "origin_ns='soon': expected a whole number"),
        ("metadata", [], "metadata=a list: expected a table"),
        ("source", "guessed", "source='guessed': expected one of measured, simulated"),
        ("totals", {"rank": 0}, "is missing in totals"),
    ],
)
def test_a_file_with_nonsense_in_it_is_named(tmp_path: Path, key: str, value: Any, words: str) -> None:
    write_trace(Trace(spans=(span(),), ranks=(0,)), tmp_path)
    path = tmp_path / "trace" / "rank0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(PlaitError, match=rf"rank0\.json.*: .*{words}"):
        read_trace(tmp_path)


def test_binary_rubbish_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank0.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlaitError, match=r"rank0\.json"):
        read_trace(tmp_path)


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    write_trace(Trace(spans=(span(),), ranks=(0,)), tmp_path)
    (tmp_path / "trace" / "rank-notes.json").write_text("mine")
    assert read_trace(tmp_path).ranks == (0,)
