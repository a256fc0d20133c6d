"""The placements of a step as one page that opens offline.

In: a `Listing` and how open choices were made. Out: an HTML document. It asks the network for nothing, and says so to
the browser. Every string is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape

from plait.program.show.listing import Listing
from plait.units import format_bytes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"
"""What the page may load: itself."""
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px;color:#1c2733;background:#fff}
h1{font-size:18px;margin:0 0 4px}h2{font-size:15px;margin:28px 0 6px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{text-align:left;color:#5b6b7b;font-weight:500;border-bottom:1px solid #c9d2db}
th,td{padding:3px 14px 3px 0;vertical-align:top;white-space:nowrap}
td.cut{color:#0b61a4;font-weight:600}td.sum{color:#b4420f;font-weight:600}
td.number{text-align:right}tr:hover td{background:#f3f6f9}p.notice{margin:2px 0;color:#5b6b7b}
@media(prefers-color-scheme:dark){body{color:#dbe4ec;background:#12181f}th{border-color:#33414e}
td.cut{color:#6db8f2}td.sum{color:#f2996d}tr:hover td{background:#1b242d}}
"""


def placements_page(listing: Listing, notices: Sequence[str], title: str) -> str:
    """The whole document."""
    mesh = " x ".join(f"{name}={size}" for name, size in listing.axes) or "1 rank"
    said = "".join(f'<p class="notice">{escape(notice)}</p>' for notice in notices)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>plan {escape(listing.plan)} on {escape(mesh)}, "
        f"{listing.num_samples} samples</p>{said}{''.join(_sections(listing))}</body></html>\n"
    )


def _sections(listing: Listing) -> Iterable[str]:
    axes = [name for name, _ in listing.axes]
    yield _table(
        "Communication of a rank in a step",
        ("axis", "collective", "count", "bytes"),
        ((t.axis, t.collective, t.count, format_bytes(t.num_bytes)) for t in listing.totals),
    )
    yield _table(
        "Parameters",
        ("name", "count", "shape", *axes, "on a rank"),
        ((p.name, p.count, str(list(p.shape)), *p.placements, p.held) for p in listing.parameters),
    )
    yield _table(
        "What ranks exchange for the ops of one micro-batch, and for the step",
        ("collective", "axis", "count", "bytes", "change", "tensor", "for", "line"),
        (
            (
                e.collective, e.axis, e.count, format_bytes(e.num_bytes), e.change, e.what, e.user or e.phase,
                e.source,
            )
            for e in listing.transfers
        ),
    )  # fmt: skip
    yield _table(
        "Fallbacks: gathered for an op, or run by a rule that is not ours",
        ("op", "axis", "count", "bytes", "tensor", "why", "line"),
        (
            (f.key, f.axis, f.count, format_bytes(f.num_bytes), f.tensor, f.reason, f.source)
            for f in listing.fallbacks
        ),
    )
    yield _table(
        "Ops: inputs → outputs",
        ("op", "count", *axes),
        ((o.key, o.count, *o.strategies) for o in listing.ops),
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return f"<h2>{escape(title)}</h2><p>none</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<h2>{escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    text = str(value)
    kind = (
        "number"
        if isinstance(value, int)
        else "cut"
        if text.startswith("S(")
        else "sum"
        if text == "P"
        else ""
    )
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
