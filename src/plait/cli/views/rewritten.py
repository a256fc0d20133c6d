"""A graph before and after rewriting: a table, and a page with both drawn.

In: a `RewrittenGraph`. Out: what rich prints, or an HTML document that asks the network for nothing.
"""

from collections import Counter
from collections.abc import Iterator
from html import escape

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from plait.api.graphs import RewrittenGraph
from plait.graph.graph import Graph
from plait.graph.show.draw import draw_html
from plait.program.cost.op_time import op_name
from plait.units import format_bytes, format_seconds

_COLUMNS = ("", "before", "after", "ratio")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-src 'self'; base-uri 'none'"
"""What the page may load: itself, and the two pages in it."""
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:1em}td,th{padding:0 1em 0 0;text-align:right}"
    "td:first-child{text-align:left}iframe{width:49.5%;height:80vh;border:1px solid #888}"
)


def rewritten_view(found: RewrittenGraph) -> Iterator[RenderableType]:
    """Costs side by side, the rules below."""
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if not name else "right")
    for row in _rows(found):
        table.add_row(*row)
    yield table
    yield Text(found.line)
    for rule in found.rules:
        yield Text(f"  {rule}", style="dim")


def rewritten_page(found: RewrittenGraph, title: str) -> str:
    """The same, and both graphs."""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in _rows(found))
    rules = "".join(f"<li>{escape(rule)}</li>" for rule in found.rules)
    graphs = "".join(
        f'<iframe title="{name}" srcdoc="{escape(draw_html(graph, name))}"></iframe>'
        for name, graph in (("before", found.captured), ("after", found.graph))
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{escape(found.line)}</p><table><tr>{head}</tr>{rows}</table><ul>{rules}</ul>{graphs}</body></html>\n"
    )


def _rows(found: RewrittenGraph) -> Iterator[tuple[str, str, str, str]]:
    """Name, before, after, their ratio; below the costs, the ops whose number changed."""
    before, after = found.before, found.after
    yield "ops", str(before.ops), str(after.ops), _ratio(before.ops, after.ops)
    flops = [f"{costs.flops / 1e6:.3g} M" for costs in (before, after)]
    yield "FLOPs", flops[0], flops[1], _ratio(before.flops, after.flops)
    moved = [format_bytes(int(costs.num_bytes)) for costs in (before, after)]
    yield "bytes", moved[0], moved[1], _ratio(before.num_bytes, after.num_bytes)
    predicted = [format_seconds(costs.predicted_s) for costs in (before, after)]
    yield "predicted", predicted[0], predicted[1], _ratio(before.predicted_s, after.predicted_s)
    if before.measured_s is not None and after.measured_s is not None:
        measured = [format_seconds(s) for s in (before.measured_s, after.measured_s)]
        yield "measured", measured[0], measured[1], _ratio(before.measured_s, after.measured_s)
    were, are = _counts(found.captured), _counts(found.graph)
    for name in sorted(were.keys() | are.keys()):
        if were[name] != are[name]:
            yield f"  {name}", str(were[name]), str(are[name]), ""


def _counts(graph: Graph) -> Counter[str]:
    return Counter(op_name(node.target) for node in graph.ops())


def _ratio(before: float, after: float) -> str:
    return f"{after / before:.2f}x" if before else ""
