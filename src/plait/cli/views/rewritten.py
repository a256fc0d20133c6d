"""A graph before and after rewriting, as a table.

In: a `RewrittenGraph`. Out: what rich prints.
"""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from plait.api.graphs import RewrittenGraph
from plait.units import format_bytes, format_seconds


def rewritten_view(found: RewrittenGraph) -> Iterator[RenderableType]:
    """Costs side by side, the rules below."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "before", "after", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    before, after = found.before, found.after
    table.add_row("ops", str(before.ops), str(after.ops), _ratio(before.ops, after.ops))
    flops = [f"{costs.flops / 1e6:.3g} M" for costs in (before, after)]
    table.add_row("FLOPs", *flops, _ratio(before.flops, after.flops))
    moved = [format_bytes(int(costs.num_bytes)) for costs in (before, after)]
    table.add_row("bytes", *moved, _ratio(before.num_bytes, after.num_bytes))
    predicted = [format_seconds(costs.predicted_s) for costs in (before, after)]
    table.add_row("predicted", *predicted, _ratio(before.predicted_s, after.predicted_s))
    if before.measured_s is not None and after.measured_s is not None:
        measured = [format_seconds(s) for s in (before.measured_s, after.measured_s)]
        table.add_row("measured", *measured, _ratio(before.measured_s, after.measured_s))
    yield table
    yield Text(found.line)
    for rule in found.rules:
        yield Text(f"  {rule}", style="dim")


def _ratio(before: float, after: float) -> str:
    return f"{after / before:.2f}x" if before else ""
