"""The times of collectives against size, as a picture that stands alone.

In: lines of (bytes, seconds), and what is to be said of each. Out: SVG text with both axes logarithmic, so that a
latency is a flat line and a bandwidth a slope; the sizes from which on another line is the lowest are marked.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle, pairwise
from math import ceil, floor, log10
from types import MappingProxyType

from plait.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 640, 380
"""Of the picture, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 150, 36, 44
"""Margins: for numbers on the left, names on the right, the title above, the axis below."""
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989")
"""Of lines, one after another."""


Lines = Mapping[str, Sequence[tuple[int, float]]]
"""(Bytes, seconds) by name."""


def crossovers(lines: Lines) -> list[tuple[float, str]]:
    """(Bytes, name): from where on another line is the lowest, between the sizes that were measured."""
    by_size: dict[int, dict[str, float]] = {}
    for name, points in lines.items():
        for size, seconds in points:
            by_size.setdefault(size, {})[name] = seconds
    best = [(size, min(found, key=found.__getitem__)) for size, found in sorted(by_size.items())]
    crossings = []
    for (before, old), (after, new) in pairwise(best):
        if old == new or not {old, new} <= by_size[before].keys() & by_size[after].keys():
            continue
        ahead, behind = (log10(by_size[size][new] / by_size[size][old]) for size in (before, after))
        share = ahead / (ahead - behind) if ahead > behind else 0.0
        crossings.append((before * (after / before) ** share, new))
    return crossings


def links_picture(title: str, lines: Lines, about: Mapping[str, str] = MappingProxyType({})) -> str:
    """The picture; `about`: what is written beside a line's name."""
    sizes = sorted({size for points in lines.values() for size, _ in points})
    times = [seconds for points in lines.values() for _, seconds in points]
    low, high = floor(log10(min(times))), ceil(log10(max(times)))

    def x(size: float) -> float:
        span = max(log10(sizes[-1]) - log10(sizes[0]), 1e-9)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (log10(size) - log10(sizes[0])) / span

    def y(seconds: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (log10(seconds) - low) / max(high - low, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{format_seconds(10.0**power)}</text>'
        )
    for size in sizes:
        parts.append(
            f'<text x="{x(size):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{format_bytes(size)}</text>'
        )
    for number, (crossing, name) in enumerate(crossovers(lines)):  # each a line lower: they may be close
        at, below = x(crossing), _TOP + 10 + 12 * number
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#999" '
            f'stroke-dasharray="3 3"/><text x="{at + 3:.1f}" y="{below}" font-size="10" fill="#555">'
            f"{escape(name)} from {format_bytes(int(crossing))}</text>"
        )
    ends = sorted(((y(points[-1][1]), name) for name, points in lines.items()))
    labels: dict[str, float] = {}
    for at, name in ends:
        labels[name] = max(at, max(labels.values(), default=0.0) + 26)
    for colour, (name, points) in zip(cycle(_COLOURS), lines.items(), strict=False):
        path = " ".join(f"{x(size):.1f},{y(seconds):.1f}" for size, seconds in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(s):.1f}" cy="{y(t):.1f}" r="3" fill="{colour}"/>' for s, t in points]
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{labels[name] + 4:.1f}" fill="{colour}">{escape(name)}'
            f'<tspan x="{_WIDTH - _RIGHT + 8}" dy="12" font-size="10">{escape(about.get(name, ""))}</tspan></text>'
        )
    return "\n".join([*parts, "</svg>", ""])
