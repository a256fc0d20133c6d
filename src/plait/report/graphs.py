"""What a run's batches were like whose graphs differ from sample to sample.

In: the totals and the metrics of a run. Out: `Graphs`, its rows for a terminal and its section of the page.
"""

from dataclasses import dataclass
from html import escape

from plait.report.record import RunRecord
from plait.units import format_seconds

_LEVELS = 12
"""Levels that are listed in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graphs:
    """Of all ranks together, unless it says otherwise."""

    num_vertices: int
    num_operations: int
    """That code for one sample was recorded to do."""
    vertices_per_s: float | None
    """Over the time of all steps."""
    operations_per_s: float | None
    vertices_by_rank: tuple[int, ...]
    mean_group: float
    """Vertices or operations that were evaluated at once, on average."""
    level_sizes: tuple[float, ...]
    """Vertices of each level, from the leaves, of a rank's share on average."""
    schedule_s: float
    """Reading or recording and ordering the graphs of a share."""
    schedule_share: float | None
    """Of the steps' time, on the rank that it takes longest on."""


def graphs_of(record: RunRecord) -> Graphs | None:
    """Sum up what ranks have counted; None: there was nothing of the kind."""
    ranks = [one for one in record.totals.get("graphs") or () if one.batches]
    if not ranks:
        return None
    steps = record.totals.get("steps")
    wall_s = sum(line.get("step_s") or 0.0 for line in (record.metrics[-steps:] if steps else ()))
    batches = sum(one.batches for one in ranks)
    vertices, operations = (sum(getattr(one, name) for one in ranks) for name in ("vertices", "operations"))
    levels = [0] * max(len(one.levels) for one in ranks)
    for one in ranks:
        for level, count in enumerate(one.levels):
            levels[level] += count
    return Graphs(
        num_vertices=vertices,
        num_operations=operations,
        vertices_per_s=vertices / wall_s if wall_s and vertices else None,
        operations_per_s=operations / wall_s if wall_s and operations else None,
        vertices_by_rank=tuple(one.vertices for one in ranks),
        mean_group=(vertices + operations) / max(sum(one.calls for one in ranks), 1),
        level_sizes=tuple(count / batches for count in levels),
        schedule_s=sum(one.schedule_s for one in ranks) / batches,
        schedule_share=max(one.schedule_s for one in ranks) / wall_s if wall_s else None,
    )


def graph_rows(graphs: Graphs | None) -> list[tuple[str, str]]:
    """What a person reads, as (name, value)."""
    if graphs is None:
        return []
    rows = []
    for noun, count, rate in (
        ("vertices", graphs.num_vertices, graphs.vertices_per_s),
        ("recorded operations", graphs.num_operations, graphs.operations_per_s),
    ):
        if count:
            told = "" if rate is None else f"{rate:,.4g} a second, "
            rows.append((noun, f"{told}{count:,} in all, {graphs.mean_group:,.4g} at once on average"))
    if sum(graphs.vertices_by_rank) and len(graphs.vertices_by_rank) > 1:
        most = max(graphs.vertices_by_rank) / (sum(graphs.vertices_by_rank) / len(graphs.vertices_by_rank))
        shown = ", ".join(f"{count:,}" for count in graphs.vertices_by_rank[:_LEVELS])
        rows.append(("vertices by rank", f"{shown} (the most: {most:.3g} times the mean)"))
    if graphs.level_sizes:
        shown = ", ".join(f"{size:.3g}" for size in graphs.level_sizes[:_LEVELS])
        more = len(graphs.level_sizes) - _LEVELS
        rest = f", ... ({more} more levels)" if more > 0 else ""
        rows.append(("vertices by level", f"{shown}{rest} (of a share, leaves first)"))
    share = "" if graphs.schedule_share is None else f", {graphs.schedule_share:.1%} of the time"
    rows.append(("scheduling", f"{format_seconds(graphs.schedule_s)} a share{share}"))
    return rows


def graphs_section(graphs: Graphs | None) -> str:
    """The page's part on graphs of samples; nothing where there were none."""
    rows = graph_rows(graphs)
    if not rows:
        return ""
    facts = "".join(f"<tr><th scope='row'>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in rows)
    table = f"<div class='scroll'><table><tbody>{facts}</tbody></table></div>"
    return f"<section><h2>Graphs of samples</h2>{table}</section>"
