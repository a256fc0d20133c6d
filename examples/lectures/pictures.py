"""Curves, bars and timelines as SVG that stands alone.

In: numbers, or a trace. Out: SVG text.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from plait.report.charts import ticks
from plait.trace.span import Trace

COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a100", "#0b7285", "#868e96")
"""Of lines and parts, in order."""
KIND_COLOURS = {
    "data": "#868e96",
    "forward": "#7fb2e5",
    "backward": "#8fcf9f",
    "communication": "#d9a3d8",
    "wait": "#e03131",
    "update": "#f0c36d",
    "host": "#ced4da",
    "evaluate": "#ced4da",
    "checkpoint": "#ced4da",
}
"""Of spans."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 320, 70, 20, 54, 44


def curves(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines by name over a common axis; logarithmic by powers of two and of ten."""

    def across(value: float) -> float:
        return math.log2(value) if log_x else value

    def up(value: float) -> float:
        return math.log10(value) if log_y else value

    points = [point for line in lines.values() for point in line]
    left, right = min(across(a) for a, _ in points), max(across(a) for a, _ in points)
    low, high = min(up(b) for _, b in points), max(up(b) for _, b in points)
    marks = (
        [float(v) for v in range(math.floor(low), math.ceil(high) + 1)]
        if log_y
        else ticks(min(low, 0.0), high, 5)
    )
    low, high = min(low, marks[0]), max(high, marks[-1])

    def place(a: float, b: float) -> tuple[float, float]:
        wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return (
            _LEFT + wide * (across(a) - left) / ((right - left) or 1),
            _HEIGHT - _BOTTOM - tall * (up(b) - low) / ((high - low) or 1),
        )

    parts = _begin(title, _WIDTH, _HEIGHT)
    for mark in marks:
        value = 10.0**mark if log_y else mark
        _, at = place(points[0][0], value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{value:.4g}", anchor="end"))
    for value in sorted({a for a, _ in points}) if log_x else ticks(left, right, 6):
        if left - 1e-9 <= across(value) <= right + 1e-9:
            parts.append(
                _text(place(value, points[0][1])[0], _HEIGHT - _BOTTOM + 18, f"{value:.6g}", anchor="middle")
            )
    for at, line in enumerate(lines.values()):
        colour = COLOURS[at % len(COLOURS)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(line) <= 40:
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>'
                for a, b in (place(*p) for p in line)
            ]
    parts += _legend(list(lines))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x, anchor="middle"))
    parts.append(
        f'<text x="16" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {_HEIGHT / 2})">'
        f"{escape(y)}</text>"
    )
    return "".join(parts) + "</svg>\n"


def bars(title: str, rows: Mapping[str, Mapping[str, float]], *, unit: str) -> str:
    """A bar a row, stacked of its parts, all to one scale."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    longest = max(sum(parts.values()) for parts in rows.values()) or 1.0
    left, row = 150, 30
    height = _TOP + row * len(rows) + 20
    drawn = _begin(title, _WIDTH, height)
    for at, (label, amounts) in enumerate(rows.items()):
        y, x = _TOP + at * row, float(left)
        drawn.append(_text(left - 8, y + 15, label, anchor="end"))
        for name, amount in amounts.items():
            wide = (_WIDTH - left - 90) * amount / longest
            tip = escape(f"{name}: {amount:.4g} {unit}")
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.0):.1f}" height="20" '
                f'fill="{COLOURS[names.index(name) % len(COLOURS)]}"><title>{tip}</title></rect>'
            )
            x += wide
        drawn.append(_text(x + 6, y + 15, f"{sum(amounts.values()):.4g} {unit}"))
    return "".join([*drawn, *_legend(names)]) + "</svg>\n"


def timeline(
    title: str, trace: Trace, step: int, *, lanes: Sequence[str] = ("compute", "communication")
) -> str:
    """One step of a trace: a row a rank and lane, a box a span, micro-batches numbered."""
    spans = [
        span for span in trace.spans if span.step == step and span.lane in lanes and span.end_s > span.start_s
    ]
    begin, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
    rows = [
        (rank, lane)
        for rank in trace.ranks
        for lane in lanes
        if any(span.rank == rank and span.lane == lane for span in spans)
    ]
    left, row, width = 120, 24, 860
    height = _TOP + row * len(rows) + 24
    parts = _begin(title, width, height)
    for at, (rank, lane) in enumerate(rows):
        parts.append(_text(8, _TOP + at * row + 14, f"{rank} {lane}" if len(lanes) > 1 else f"rank {rank}"))
    scale = (width - left - 16) / (end - begin)
    for span in sorted(spans, key=lambda span: span.start_s):
        x, y = left + (span.start_s - begin) * scale, _TOP + rows.index((span.rank, span.lane)) * row
        wide = max((span.end_s - span.start_s) * scale, 0.6)
        tip = escape(f"{span.name}: {1e3 * span.duration_s:.3g} ms")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="18" fill="{KIND_COLOURS[span.kind]}" '
            f'stroke="#fff" stroke-width="0.4"><title>{tip}</title></rect>'
        )
        if span.micro_batch is not None and wide > 12 and span.kind in ("forward", "backward"):
            parts.append(_text(x + wide / 2, y + 13, str(span.micro_batch), anchor="middle", size=10))
    kinds = list(dict.fromkeys(span.kind for span in spans))
    parts += _legend(kinds, [KIND_COLOURS[kind] for kind in kinds])
    parts.append(_text(width - 16, height - 6, f"{1e3 * (end - begin):.4g} ms", anchor="end"))
    return "".join(parts) + "</svg>\n"


def _begin(title: str, width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        _text(8, 20, title, size=14),
    ]


def _legend(names: Sequence[str], colours: Sequence[str] = COLOURS) -> list[str]:
    parts, x = [], 8.0
    for at, name in enumerate(names):
        parts.append(f'<rect x="{x:.1f}" y="30" width="10" height="10" fill="{colours[at % len(colours)]}"/>')
        parts.append(_text(x + 14, 39, name, size=11))
        x += 26 + 6.2 * len(name)
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
