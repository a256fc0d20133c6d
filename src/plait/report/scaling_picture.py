"""How a job scales, as a picture that stands alone.

In: numbers of devices with their rates. Out: SVG text: the rate against devices, and the line of perfect scaling.
"""

from collections.abc import Sequence
from html import escape

from plait.report.charts import ticks

_WIDTH, _HEIGHT = 560, 320
"""Of the picture, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 36, 44
"""Margins: for numbers on the left, the title above, the axis and its name below."""


def scaling_picture(title: str, points: Sequence[tuple[int, float]]) -> str:
    """(devices, samples per second) as an SVG; the first point sets what is perfect."""
    first_ranks, first_rate = points[0]
    most = max(ranks for ranks, _ in points)
    perfect = first_rate * most / first_ranks
    top = max(perfect, *(rate for _, rate in points))

    def x(ranks: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ranks / most

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for value in ticks(0.0, top, 5):
        if value <= top:
            parts.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
            )
            parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for ranks, _ in points:
        parts.append(
            f'<text x="{x(ranks):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{ranks}</text>'
        )
    parts.append(
        f'<line x1="{x(first_ranks):.1f}" y1="{y(first_rate):.1f}" x2="{x(most):.1f}" y2="{y(perfect):.1f}" '
        'stroke="#999" stroke-dasharray="5 4"/>'
    )
    path = " ".join(f"{x(ranks):.1f},{y(rate):.1f}" for ranks, rate in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
    parts += [
        f'<circle cx="{x(ranks):.1f}" cy="{y(rate):.1f}" r="4" fill="#1f6feb"/>' for ranks, rate in points
    ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">devices (dashed: perfect)</text>'
    )
    parts.append(
        f'<text x="16" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {_HEIGHT / 2})">samples/s</text>'
    )
    return "\n".join([*parts, "</svg>", ""])
