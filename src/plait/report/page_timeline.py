"""The part of the page that shows one step of all ranks.

In: a `Trace`. Out: a section of HTML that carries a few steps as JSON; `assets/page.js` draws the chosen one.
It bounds what it embeds, so that the page of a long run on many ranks still opens.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from plait.report.summary import finite
from plait.report.timeline import step_bounds, typical_step
from plait.trace.files import rows_without_overlap
from plait.trace.span import KINDS, LANES, Lane, Span, Trace
from plait.units import format_bytes, format_seconds

_MAX_STEPS = 8
"""Steps to choose from."""
_MAX_SPANS = 40_000
"""Spans of all of them, about 2 MB; one step is always there."""


def timeline_section(trace: Trace | None) -> str:
    if trace is None or not trace.spans:
        return ""
    steps = embedded_steps(trace)
    data = json.dumps(finite(_timeline_data(trace, steps)), separators=(",", ":")).replace("<", "\\u003c")
    typical = steps[0].step
    options = "".join(
        f"<option value='{one.step}'{' selected' if one.step == typical else ''}>step {one.step + 1}: "
        f"{escape(format_seconds(one.end_s - one.start_s))}</option>"
        for one in sorted(steps, key=lambda one: one.step)
    )
    kinds = [kind for kind in KINDS if any(span.kind == kind for one in steps for span in one.spans)]
    names = {"wait": "exposed communication", "communication": "communication, under way"}
    legend = "".join(
        f"<span class='key kind-{kind}'>{escape(names.get(kind, kind))}</span>" for kind in kinds
    )
    return (
        "<section><h2>One step, all lanes</h2><div class='tools'><label>Show <select id='step'>"
        f"{options}</select></label><button type='button' id='closer' aria-label='Zoom in'>+</button>"
        "<button type='button' id='wider' aria-label='Zoom out'>&minus;</button>"
        "<button type='button' id='whole'>Whole step</button>"
        "<span class='unit'>wheel or + and &minus; zoom, drag or arrow keys move, hover to read</span></div>"
        f"<p class='legend'>{legend}</p><div id='timeline'></div>"
        "<noscript>The timeline needs JavaScript; trace/trace.json holds the same spans.</noscript>"
        f"<script type='application/json' id='spans'>{data}</script></section>"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedStep:
    """A step that the page can show."""

    step: int
    """Its number."""
    start_s: float
    """Its first start on any compute lane."""
    end_s: float
    """Its last end on any compute lane."""
    spans: tuple[Span, ...]
    """All its spans."""


def embedded_steps(trace: Trace, *, max_spans: int = _MAX_SPANS) -> list[EmbeddedStep]:
    """The typical step first, then the first and the latest, as many as keep the page light."""
    typical = typical_step(trace)
    assert typical is not None
    wanted = list(dict.fromkeys([typical, trace.steps[0], *reversed(trace.steps)]))[:_MAX_STEPS]
    by_step: dict[int, list[Span]] = {step: [] for step in wanted}
    for span in trace.spans:
        if span.step in by_step:
            by_step[span.step].append(span)
    chosen: list[EmbeddedStep] = []
    room = max_spans
    for step in wanted:
        room -= len(by_step[step])
        if chosen and room < 0:
            break
        start_s, end_s = step_bounds(by_step[step])
        chosen.append(EmbeddedStep(step=step, start_s=start_s, end_s=end_s, spans=tuple(by_step[step])))
    return chosen


def _timeline_data(trace: Trace, steps: Sequence[EmbeddedStep]) -> dict[str, Any]:
    names: dict[str, int] = {}
    shown: dict[int, Any] = {}
    for one in steps:
        by_lane: dict[tuple[int, Lane], list[Span]] = defaultdict(list)
        for span in one.spans:
            by_lane[span.rank, span.lane].append(span)
        rows = []
        for rank in trace.ranks:
            for lane in LANES:
                for index, row in enumerate(rows_without_overlap(by_lane[rank, lane])):
                    spans = [_embedded(span, one.start_s, names) for span in row]
                    rows.append({"rank": rank, "lane": lane if index == 0 else "", "spans": spans})
        shown[one.step] = {"us": round((one.end_s - one.start_s) * 1e6, 3), "rows": rows}
    return {"kinds": KINDS, "steps": shown, "names": list(names)}


def _embedded(span: Span, start_s: float, names: dict[str, int]) -> list[Any]:
    return [
        round((span.start_s - start_s) * 1e6, 3),
        round(span.duration_s * 1e6, 3),
        KINDS.index(span.kind),
        names.setdefault(span.name, len(names)),
        span.instruction,
        span.micro_batch,
        span.stage,
        format_bytes(span.num_bytes) if span.num_bytes else None,
    ]
