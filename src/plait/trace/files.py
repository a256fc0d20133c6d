"""The files of `<run>/trace/`: one compact JSON file per rank, and one that Chrome and Perfetto open.

In: a `Trace`, or what one `Recorder` holds. Out: files, written whole or not at all; and the `Trace` read
back from them. It never guesses: a file that is missing, cut short or not a trace is an error that names it.

    {"format": "plait-trace", "version": 1, "rank": 0, "origin_ns": ..., "source": "measured", "metadata": {},
     "instructions": [[id, kind, name, lane, micro_batch, stage, num_bytes], ...],
     "spans": [[step, row of instructions, start_ns after the origin, duration_ns], ...],
     "totals": {...} or null}
"""

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from plait.errors import PlaitError
from plait.files.document import Format
from plait.files.shape import read_json
from plait.files.write import write_whole
from plait.trace.span import LANES, Lane, Source, Span, SpanKind, Totals, Trace

FORMAT = "plait-trace"
VERSION = 1
"""Of what is written; a reader of another refuses it."""


class Description(NamedTuple):
    """What an instruction is; all that its spans share."""

    instruction: int
    kind: SpanKind
    name: str
    lane: Lane
    micro_batch: int | None
    stage: int | None
    num_bytes: int


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The file as it stands."""

    format: Literal["plait-trace"]
    version: Literal[1]
    rank: int
    origin_ns: int
    source: Source
    metadata: dict[str, Any]
    instructions: list[Description]
    spans: list[tuple[int, int, int, int]]
    totals: Totals | None


_FORMAT = Format(
    noun="a trace",
    error=PlaitError,
    fix="delete this file to see the other ranks, or run the job again.",
    max_bytes=1 << 30,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """The content of one rank's file, its times still those of the rank's own clock."""

    rank: int
    """The process that recorded it."""
    offset_ns: int
    """What takes the clock of the spans to nanoseconds since the epoch."""
    descriptions: Mapping[int, Description]
    """What the spans refer to."""
    spans: Sequence[tuple[int, int, int, int]]
    """Step, key of its description, start and end in nanoseconds."""
    totals: Totals | None
    """Sums over the run, where spans were left out."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Facts for readers."""
    source: Source = "measured"
    """Who made it."""


def write_rank(path: Path, content: RankFile) -> None:
    """Write one rank's file."""
    origin_ns = min((span[2] for span in content.spans), default=0)
    rows = {key: row for row, key in enumerate(content.descriptions)}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "rank": content.rank,
        "origin_ns": origin_ns + content.offset_ns,
        "source": content.source,
        "metadata": dict(content.metadata),
        "instructions": list(content.descriptions.values()),
        "spans": [
            [step, rows[key], start - origin_ns, max(0, end - start)]
            for step, key, start, end in content.spans
        ],
        "totals": None if content.totals is None else dataclasses.asdict(content.totals),
    }
    write_whole(path, json.dumps(document, separators=(",", ":")))


def write_trace(trace: Trace, run_dir: Path) -> None:
    """Write a whole trace, simulated ones too, as a run leaves it: a file per rank and `trace.json`."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        spans[span.rank].append(span)
    totals = {one.rank: one for one in trace.totals}
    metadata = {key: value for key, value in trace.metadata.items() if key != "origin_ns"}
    for rank in trace.ranks:
        rows: dict[Description, int] = {}
        times = []
        for span in spans[rank]:
            row = rows.setdefault(_describe(span), len(rows))
            times.append((span.step, row, round(span.start_s * 1e9), round(span.end_s * 1e9)))
        content = RankFile(
            rank=rank,
            offset_ns=int(trace.metadata.get("origin_ns", 0)),
            descriptions={row: description for description, row in rows.items()},
            spans=times,
            totals=totals.get(rank),
            metadata=metadata,
            source=trace.source,
        )
        write_rank(trace_dir(run_dir) / f"rank{rank}.json", content)
    write_chrome(trace, trace_dir(run_dir) / "trace.json")


def read_trace(run_dir: Path) -> Trace:
    """The trace of a run folder, its ranks aligned on the earliest moment of any of them."""
    folder = trace_dir(run_dir)
    paths = {
        int(match[1]): path for path in folder.glob("rank*.json") if (match := _RANK.fullmatch(path.name))
    }
    if not paths:
        raise PlaitError(
            f"{folder} holds no rank<k>.json, so nothing is known of how this run spent its time.",
            fix="give the folder of a run that has trained at least one step with tracing on.",
        )
    documents = {rank: read_json(paths[rank], _Document, _FORMAT) for rank in sorted(paths)}
    origin_ns = min((document.origin_ns for document in documents.values() if document.spans), default=0)
    spans: list[Span] = []
    totals: list[Totals] = []
    for rank, document in documents.items():
        try:
            spans.extend(_spans(rank, document, origin_ns))
        except (ValueError, IndexError) as error:
            raise _FORMAT.refusal(str(paths[rank]), f"it is not a trace: {error}") from error
        if document.totals is not None:
            totals.append(dataclasses.replace(document.totals, rank=rank))
    first = next(iter(documents.values()))
    return Trace(
        spans=tuple(spans),
        ranks=tuple(documents),
        source=first.source,
        metadata={**first.metadata, "origin_ns": origin_ns},
        totals=tuple(totals),
    )


def write_chrome(trace: Trace, path: Path) -> None:
    """Write the Chrome trace format: a process per rank, a thread per lane, one complete event per span."""
    write_whole(path, json.dumps({"traceEvents": chrome_events(trace), "displayTimeUnit": "ms"}))


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """The events of `write_chrome`.

    Spans of a lane that overlap (several messages under way at once) go to threads `communication 2`, `3`, …:
    viewers need the events of a thread to follow each other or to nest.
    """
    by_lane: dict[tuple[int, Lane], list[Span]] = defaultdict(list)
    for span in trace.spans:
        by_lane[span.rank, span.lane].append(span)
    events: list[dict[str, Any]] = []
    for rank in trace.ranks:
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        )
        for index, lane in enumerate(LANES):
            for row, spans in enumerate(rows_without_overlap(by_lane[rank, lane])):
                thread = index + 1 + len(LANES) * row
                events.append(_name("thread_name", rank, thread, lane if row == 0 else f"{lane} {row + 1}"))
                events.append(
                    {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread}
                    | {"args": {"sort_index": index * 1000 + row}}
                )
                events.extend(_complete(span, thread) for span in spans)
    return events


def rows_without_overlap(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans over as few rows as they need, so that those of one row follow each other."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        row = next((row for row in rows if _end_ns(row[-1]) <= _start_ns(span)), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def trace_dir(run_dir: Path) -> Path:
    """Where a run folder keeps its trace."""
    return Path(run_dir) / "trace"


_RANK = re.compile(r"rank([0-9]{1,9})\.json")


def _describe(span: Span) -> Description:
    return Description(
        span.instruction, span.kind, span.name, span.lane, span.micro_batch, span.stage, span.num_bytes
    )


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _start_ns(span: Span) -> int:
    return round(span.start_s * 1e9)


def _end_ns(span: Span) -> int:
    return round(span.end_s * 1e9)


def _complete(span: Span, thread: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": span.step, "instruction": span.instruction}
    if span.micro_batch is not None:
        arguments["micro_batch"] = span.micro_batch
    if span.stage is not None:
        arguments["stage"] = span.stage
    if span.num_bytes:
        arguments["bytes"] = span.num_bytes
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": _start_ns(span) / 1000,
        "dur": (_end_ns(span) - _start_ns(span)) / 1000,
        "args": arguments,
    }


def _spans(rank: int, document: _Document, origin_ns: int) -> Iterable[Span]:
    shift_ns = document.origin_ns - origin_ns
    for step, row, start_ns, duration_ns in document.spans:
        if not 0 <= row < len(document.instructions):
            raise ValueError(f"a span is of instruction {row}; there are {len(document.instructions)}")
        start = start_ns + shift_ns
        yield Span(
            rank=rank,
            step=step,
            start_s=start * 1e-9,
            end_s=(start + duration_ns) * 1e-9,
            **document.instructions[row]._asdict(),
        )
