"""A scene as SVG text: a column per rank, a row per op, communication as bars across all columns."""

from collections.abc import Iterator, Sequence
from html import escape

from docs.pictures.scene import Bar, Row, Scene
from docs.pictures.tensors import Tensor

UNIT = 8
"""Pixels of one element."""
GAP = 10
LEFT = 92
"""Where the columns begin; left of it stands what a row is."""
COLOURS = ("#2f7bc4", "#e0892b", "#3f9a62", "#9a5fb8")
"""One per rank."""
BARS = {
    "all_reduce": "#c2314b",
    "reduce_scatter": "#8a3fa8",
    "all_gather": "#0f7f86",
    "halo": "#8a6a12",
    "halo_add": "#8a6a12",
    "none": "#8793a0",
}
PHASES = {
    "held": ("held", "all the time"),
    "forward": ("forward", ""),
    "backward": ("backward", ""),
    "update": ("update", ""),
}
_FONT = 'font-family="Helvetica,Arial,sans-serif"'


def draw(scene: Scene) -> str:
    """The whole document."""
    rows = [part for part in scene.parts if isinstance(part, Row)]
    column = max([150, *(_width(row.items) for row in rows)]) + 4 * GAP
    ranks = len(scene.ranks)
    width = LEFT + ranks * column + GAP
    longest = max((len(part.text) for part in scene.parts if isinstance(part, Bar)), default=0)
    width = max(width, LEFT + 8 * longest, 9 * len(scene.title))
    body: list[str] = [_text(GAP, 24, scene.title, size=16, weight="bold")]
    for rank, name in enumerate(scene.ranks):
        centre = LEFT + rank * column + (column - GAP) / 2
        body.append(_text(centre, 50, name, size=13, weight="bold", colour=COLOURS[rank], anchor="middle"))
    y, phase = 62.0, ""
    columns: list[str] = []
    for part in scene.parts:
        if isinstance(part, Bar):
            body += _bar(part, y, LEFT + ranks * column - GAP)
            y += 34
            continue
        height = _height(part.items)
        if part.phase != phase:
            y += 4
            body += _heading(part.phase, y, LEFT + ranks * column - GAP)
            phase = part.phase
            y += 8
        for rank in range(ranks):
            columns += _row(part.items, rank, LEFT + rank * column + GAP, y, height)
        y += height + 26
    legend_y = y + 16
    body += _legend(legend_y)
    total = legend_y + 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {total:g}" width="{width:g}" '
        f'height="{total:g}" role="img" aria-label="{escape(scene.title)}">\n<defs>\n{_patterns(ranks)}</defs>\n'
        f'<rect width="{width:g}" height="{total:g}" fill="#ffffff"/>\n'
        + "\n".join([*body, *columns])
        + "\n</svg>\n"
    )


def _patterns(ranks: int) -> str:
    return "".join(
        f'<pattern id="sum{rank}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="#ffffff"/><rect width="3" height="6" fill="{COLOURS[rank]}"/></pattern>\n'
        for rank in range(ranks)
    )


def _heading(phase: str, y: float, right: float) -> list[str]:
    name, more = PHASES[phase]
    lines = [
        f'<line x1="{GAP}" y1="{y:g}" x2="{right:g}" y2="{y:g}" stroke="#d5dbe1"/>',
        _text(GAP, y + 20, name, size=13, weight="bold"),
    ]
    return [*lines, _text(GAP, y + 36, more, size=11, colour="#5b6773")] if more else lines


def _bar(bar: Bar, y: float, right: float) -> list[str]:
    colour = BARS[bar.collective]
    weak = bar.collective == "none"
    return [
        f'<rect x="{LEFT}" y="{y:g}" width="{right - LEFT:g}" height="24" rx="4" fill="{colour}" '
        f'opacity="{0.25 if weak else 1}"/>',
        _text(LEFT + GAP, y + 16.5, bar.text, size=12, colour="#2b333b" if weak else "#ffffff"),
    ]


def _row(items: Sequence[Tensor | str], rank: int, x: float, y: float, height: float) -> Iterator[str]:
    for item in items:
        if isinstance(item, str):
            width = _width([item])
            yield _text(x + width / 2, y + height / 2 + 4, item, size=13, anchor="middle")
            x += width + GAP
        else:
            yield from _tensor(item, rank, x, y + (height - item.shape[0] * UNIT) / 2)
            x += _width([item]) + GAP


def _tensor(tensor: Tensor, rank: int, x: float, y: float) -> Iterator[str]:
    rows, columns = (extent * UNIT for extent in tensor.shape)
    x += (_width([tensor]) - columns) / 2
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{columns}" height="{rows}" fill="#f1f3f5" stroke="#b4bdc6" '
        'stroke-dasharray="2 2"/>'
    )
    fill = f"url(#sum{rank})" if tensor.is_sum else COLOURS[rank]
    for row, column, height, width in tensor.edges[rank] if tensor.edges else ():
        yield _rectangle(x + column * UNIT, y + row * UNIT, width, height, COLOURS[rank], rank, opacity=0.4)
    for row, column, height, width in tensor.pieces[rank]:
        left, top = x + column * UNIT, y + row * UNIT
        yield _rectangle(left, top, width, height, fill, rank)
        if tensor.is_sum and height >= 3:
            left, top = left + width * UNIT / 2, top + height * UNIT / 2
            yield f'<circle cx="{left:g}" cy="{top:g}" r="9" fill="#ffffff" stroke="{COLOURS[rank]}"/>'
            yield _text(left, top + 4.5, "Σ", size=13, weight="bold", anchor="middle")
    label = f"{tensor.name} {tensor.text}".strip()
    yield _text(x + columns / 2, y + rows + 13, label, size=11, anchor="middle")


def _rectangle(
    x: float, y: float, columns: int, rows: int, fill: str, rank: int, *, opacity: float = 1.0
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{columns * UNIT}" height="{rows * UNIT}" fill="{fill}" '
        f'stroke="{COLOURS[rank]}" opacity="{opacity:g}"/>'
    )


def _legend(y: float) -> list[str]:
    entries = (
        (f'fill="{COLOURS[0]}" stroke="{COLOURS[0]}"', "this rank has it"),
        (f'fill="url(#sum0)" stroke="{COLOURS[0]}"', "Σ: a summand; the value is the sum over ranks"),
        ('fill="#f1f3f5" stroke="#b4bdc6" stroke-dasharray="2 2"', "another rank has it"),
    )
    parts: list[str] = []
    x = float(LEFT)
    for style, text in entries:
        parts.append(f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="12" {style}/>')
        parts.append(_text(x + 20, y, text, size=11))
        x += 40 + 6 * len(text)
    return parts


def _width(items: Sequence[Tensor | str]) -> float:
    """Pixels of items side by side: a tensor is as wide as its name at least."""
    widths = [
        8.0 * len(item) + 4
        if isinstance(item, str)
        else max(item.shape[1] * UNIT, 6.0 * len(f"{item.name} {item.text}"))
        for item in items
    ]
    return sum(widths) + GAP * (len(items) - 1)


def _height(items: Sequence[Tensor | str]) -> float:
    return float(max([20, *(item.shape[0] * UNIT for item in items if isinstance(item, Tensor))]))


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int,
    weight: str = "normal",
    colour: str = "#1d252d",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {_FONT} font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(text)}</text>'
    )
