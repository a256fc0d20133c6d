"""Line charts and stacked bars as SVG, to stand in a page.

In: numbers. Out: SVG text whose colours are classes of `assets/page.css` and whose strings are escaped.
It runs no script: a chart carries its points in `data-points`, where the page's script finds its hover texts.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 250
"""Of a chart, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34
"""Margins: on the left for a number of six digits, below for the axis and its name."""
_MAX_POINTS = 600
"""Points a line is drawn with; more are averaged, with a band from their lowest to their highest."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One quantity against the step."""

    name: str
    """What the legend and the hover text call it."""
    points: Sequence[Point]
    """Step and value; values that are not finite are left out."""
    style: str
    """`first`, `second`: its colour. With `dots` a mark on each point."""


def line_chart(title: str, lines: Sequence[Line], *, from_zero: bool = False) -> str:
    """An SVG of the lines over the step, with axes and a summary for screen readers."""
    drawn = [_Drawn(line) for line in lines]
    drawn = [one for one in drawn if one.means]
    if not drawn:
        return f'<p class="empty">Nothing was logged for {escape(title.lower())}.</p>'
    xs = [x for one in drawn for x, _ in one.means]
    ys = [y for one in drawn for _, low, high in one.band for y in (low, high)]
    x_ticks = ticks(min(xs), max(xs), 6)
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys), 5)
    frame = _Frame(
        left=min(xs),
        right=max(max(xs), min(xs) + 1e-9),
        bottom=min(y_ticks[0], min(ys)),
        top=max(y_ticks[-1], max(ys)),
    )
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(_spoken(title, drawn))}" '
        f'data-points="{escape(json.dumps(_hover(drawn, frame)))}">'
    ]
    for value in y_ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        )
    for value in x_ticks:
        if frame.left <= value <= frame.right:
            x = frame.x(value)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{value:.6g}</text>'
            )
    parts.append(f'<text class="tick" x="{WIDTH - _RIGHT}" y="{HEIGHT - 1}" text-anchor="end">step</text>')
    for one in drawn:
        parts.extend(one.shapes(frame))
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/><circle class="cursor" r="4"/>')
    parts.append("</svg>")
    return "".join(parts)


def stacked_bar(label: str, parts: Sequence[tuple[str, str, float]], *, whole: float, longest: float) -> str:
    """One horizontal bar: parts of (class, hover text, amount), drawn on the scale of the longest bar."""
    pieces = []
    left = 0.0
    for style, text, amount in parts:
        width = 1000.0 * amount / longest if longest > 0 else 0.0
        if width > 0:
            pieces.append(
                f'<rect class="{escape(style)}" x="{left:.2f}" y="0" width="{width:.2f}" height="26" '
                f'data-tip="{escape(text)}"><title>{escape(text)}</title></rect>'
            )
        left += width
    return (
        f'<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}" data-whole="{whole:.9g}">{"".join(pieces)}</svg>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that span an interval: 1, 2 or 5 times a power of ten apart."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [float(f"{index * gap:.12g}") for index in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Takes values to pixels."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = (self.top - self.bottom) or 1.0
        return HEIGHT - _BOTTOM - (value - self.bottom) / span * (HEIGHT - _TOP - _BOTTOM)


class _Drawn:
    """A line reduced to as many points as can be told apart."""

    def __init__(self, line: Line) -> None:
        points = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
        size = max(1, math.ceil(len(points) / _MAX_POINTS))
        groups = [points[index : index + size] for index in range(0, len(points), size)]
        self.line = line
        self.averaged = size > 1
        self.means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
        self.band = [
            (x, min(y for _, y in g), max(y for _, y in g))
            for (x, _), g in zip(self.means, groups, strict=True)
        ]
        self.last = points[-1] if points else None

    def shapes(self, frame: _Frame) -> list[str]:
        """The band, the line, and the marks."""
        shapes = []
        if self.averaged:
            outline = [(x, high) for x, _, high in self.band] + [
                (x, low) for x, low, _ in reversed(self.band)
            ]
            shapes.append(
                f'<polygon class="band {escape(self.line.style)}" points="{_path(outline, frame)}"/>'
            )
        shapes.append(
            f'<polyline class="line {escape(self.line.style)}" points="{_path(self.means, frame)}"/>'
        )
        if "dots" in self.line.style or len(self.means) == 1:
            shapes.extend(
                f'<circle class="dot {escape(self.line.style)}" r="4" '
                f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"/>'
                for x, y in self.means
            )
        return shapes


def _path(points: Sequence[Point], frame: _Frame) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _hover(drawn: Sequence[_Drawn], frame: _Frame) -> list[tuple[float, float, str]]:
    return [
        (round(frame.x(x), 1), round(frame.y(y), 1), f"step {x:.6g}: {one.line.name} {y:.5g}")
        for one in drawn
        for x, y in one.means
    ]


def _spoken(title: str, drawn: Sequence[_Drawn]) -> str:
    ends = [f"{one.line.name} from {one.means[0][1]:.4g} to {one.last[1]:.4g}" for one in drawn if one.last]
    return f"{title} over {len(drawn[0].line.points)} logged steps: {'; '.join(ends)}"
