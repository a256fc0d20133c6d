"""One step of all ranks, drawn with characters.

In: a `Trace`. Out: rows of cells, a kind of work or nothing in each; and a step worth looking at.
It knows nothing of terminals: `text.py` gives the cells their colours.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from plait.trace.span import LANES, Lane, Span, SpanKind, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One lane of one rank."""

    rank: int
    """The process."""
    lane: Lane
    """The queue."""
    cells: tuple[SpanKind | None, ...]
    """The kind that fills most of each slice of time; `None` where the lane was mostly free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One step, all lanes."""

    step: int
    """Its number."""
    duration_s: float
    """From the first start to the last end on any compute lane."""
    rows: tuple[Row, ...]
    """By rank, then by lane; lanes that did nothing are left out."""


def step_bounds(spans: Iterable[Span]) -> tuple[float, float]:
    """Where a step starts and ends over all ranks, by its compute lanes: others reach into other steps."""
    everything = list(spans)
    line = [span for span in everything if span.lane == "compute"] or everything
    return min(span.start_s for span in line), max(span.end_s for span in line)


def typical_step(trace: Trace) -> int | None:
    """The step of median duration; the first of three or more does not count, since it warms up."""
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        by_step[span.step].append(span)
    steps = sorted(by_step)
    if not steps:
        return None
    candidates = steps[1:] if len(steps) >= 3 else steps
    durations = {}
    for step in candidates:
        start_s, end_s = step_bounds(by_step[step])
        durations[step] = end_s - start_s
    middle = statistics.median_low(durations.values())
    return next(step for step in candidates if durations[step] == middle)


def timeline(trace: Trace, *, step: int, num_cells: int) -> Timeline:
    """The lanes of one step in `num_cells` slices of equal length."""
    spans = [span for span in trace.spans if span.step == step]
    start_s, end_s = step_bounds(spans)
    by_lane: dict[tuple[int, Lane], list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.rank, span.lane].append(span)
    rows = [
        Row(rank=rank, lane=lane, cells=_cells(by_lane[rank, lane], start_s, end_s, num_cells))
        for rank in trace.ranks
        for lane in LANES
        if (rank, lane) in by_lane
    ]
    return Timeline(step=step, duration_s=end_s - start_s, rows=tuple(rows))


def _cells(spans: list[Span], start_s: float, end_s: float, num_cells: int) -> tuple[SpanKind | None, ...]:
    width_s = (end_s - start_s) / num_cells
    filled: list[dict[SpanKind, float]] = [{} for _ in range(num_cells)]
    if width_s > 0:
        for span in spans:
            first = max(0, int((span.start_s - start_s) / width_s))
            last = min(num_cells - 1, int((span.end_s - start_s) / width_s))
            for index in range(first, last + 1):
                left = start_s + index * width_s
                covered = min(span.end_s, left + width_s) - max(span.start_s, left)
                filled[index][span.kind] = filled[index].get(span.kind, 0.0) + max(0.0, covered)
    cells: list[SpanKind | None] = []
    for kinds in filled:
        free_s = width_s - sum(kinds.values())
        best = max(kinds, key=lambda kind: kinds[kind], default=None)
        cells.append(best if best is not None and kinds[best] >= free_s and kinds[best] > 0 else None)
    return tuple(cells)
