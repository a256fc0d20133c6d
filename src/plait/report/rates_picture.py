"""The loss against the learning rate, as a picture that stands alone.

In: rates that grow, and losses. Out: SVG text: each loss as a dot, their mean as a line, the suggested rate marked.
"""

import math
from collections.abc import Sequence
from html import escape

from plait.report.charts import ticks

_WIDTH, _HEIGHT = 560, 320
"""Of the picture, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 36, 44
"""Margins: for numbers on the left, the title above, the axis and its name below."""
_ROOM = 1.3
"""The picture ends at so many times the first mean loss: what diverges would make the rest a flat line."""


def rates_picture(
    rates: Sequence[float], losses: Sequence[float], means: Sequence[float], suggested: float
) -> str:
    """Losses by rate, on a logarithmic axis."""
    left, right = math.log10(rates[0]), math.log10(rates[-1])
    top = _ROOM * max(means[0], min(means))
    shown = [loss for loss in (*losses, *means) if math.isfinite(loss) and loss <= top]
    low = min(0.0, *shown)

    def x(rate: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(rate) - left) / ((right - left) or 1.0)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (loss - low) / ((top - low) or 1.0)

    title = f"loss by learning rate; falls fastest at {suggested:.2g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for value in ticks(low, top, 5):
        if low <= value <= top:
            parts.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
            )
            parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for power in range(math.ceil(left), math.floor(right) + 1):
        where = f'x="{x(10.0**power):.1f}" y="{_HEIGHT - _BOTTOM + 18}"'
        parts.append(f'<text {where} text-anchor="middle">1e{power}</text>')
    pairs = [(a, b) for a, b in zip(rates, losses, strict=True) if math.isfinite(b) and b <= top]
    parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2" fill="#9db8e0"/>' for a, b in pairs]
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(rates, means, strict=True) if b <= top)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
    parts.append(
        f'<line x1="{x(suggested):.1f}" x2="{x(suggested):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" '
        'stroke="#d9480f" stroke-dasharray="5 4"/>'
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">learning rate</text>')
    return "".join([*parts, "</svg>"])
