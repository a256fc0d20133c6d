"""Rankings and scaling tables for a console, as JSON, and as a picture.

In: what `search/` found. Out: tables, plain values, SVG text. It decides nothing.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from plait.search.choose.candidates import relaxed
from plait.search.choose.explain import describe
from plait.search.choose.rank import Ranking, Rejected
from plait.search.choose.scaling import Scaled
from plait.units import format_bytes, format_count, format_seconds

_REJECTED_SHOWN = 8
"""Plans that cannot be used, as many as still let the ranking be seen on one screen."""
_BAR = 30
"""Characters of the bar of an efficiency of 1.5, the longest."""


def ranking_view(title: str, ranking: Ranking, limit_bytes: float) -> Group:
    """Plans that fit, those that do not, and those that compute something else."""
    considered = (
        f"{ranking.num_candidates} plans considered, {ranking.num_predicted} predicted, "
        f"{format_seconds(ranking.seconds)}; {format_bytes(limit_bytes)} a device"
    )
    parts: list[Any] = [Text.assemble((title, "bold"), f"  {considered}"), _plans(ranking)]
    rejected = folded(ranking.rejected)
    if ranking.predictions[0].cost_per_step is not None:
        parts.append(Text("cost/1k: money for 1,000 steps on all devices", "dim"))
    if rejected:
        parts.append(_rejected(rejected))
    parts.append(_relaxed(ranking))
    parts += [Text.assemble(("notice  ", "yellow"), notice) for notice in ranking.notices]
    return Group(*parts)


def _plans(ranking: Ranking) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    money = ranking.predictions[0].cost_per_step is not None
    table.add_column("", justify="right")
    table.add_column("plan", overflow="fold", min_width=16)
    names = ["micro", "step", "samples/s", "MFU", "memory", "sent"]
    for name in [*names, "cost/1k"] if money else names:
        table.add_column(name, justify="right", no_wrap=True)
    for number, found in enumerate(ranking.predictions, 1):
        sent = sum(found.sent_bytes.values())
        cells = [
            str(number),
            describe(found.plan),
            f"{found.num_micro_batches} x {found.micro_batch}",
            format_seconds(found.step_s),
            format_rate(found.samples_per_s),
            f"{found.utilization:.1%}",
            format_bytes(found.memory.total),
            format_bytes(sent) if sent else "–",
        ]
        if money:
            cells.append(f"{1000 * (found.cost_per_step or 0.0):.3g}")
        table.add_row(*map(Text, cells))
    return table


def format_rate(per_s: float) -> str:
    """`4.4k`, `76.3`, `5.03`."""
    return format_count(per_s) if per_s >= 1000 else f"{per_s:.3g}"


def folded(rejected: Sequence[Rejected]) -> list[tuple[str, str]]:
    """Plans that cannot be used, each reason once for a mesh: schedules do not change what the weights need."""
    found: dict[tuple[str, str], None] = {}
    for entry in sorted(rejected, key=lambda entry: entry.needs_bytes):
        mesh = " x ".join(f"{name}={size}" for name, size in entry.mesh.axes)
        zero = f", zero{entry.plan.memory.zero}" if entry.plan is not None and entry.plan.memory.zero else ""
        away = ", offload" if entry.plan is not None and entry.plan.memory.offload != "none" else ""
        found.setdefault((mesh + zero + away, entry.reason))
    return list(found)


def _rejected(rejected: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Cannot be used", title_justify="left", pad_edge=False)
    table.add_column("plan")
    table.add_column("reason", overflow="fold")
    for plan, reason in rejected[:_REJECTED_SHOWN]:
        table.add_row(Text(plan), Text(reason))
    if len(rejected) > _REJECTED_SHOWN:
        table.caption = f"{len(rejected) - _REJECTED_SHOWN} more: --json has all"
        table.caption_justify = "left"
    return table


def _relaxed(ranking: Ranking) -> Table:
    title = "Not ranked: changes what is computed, so that only you can choose it"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("plan")
    for name in ("step", "samples/s", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what it does instead", overflow="fold")
    priced = {found.plan.name: found for found in ranking.relaxed}
    for name, what in relaxed().items():
        found = priced.get(name)
        cells = ["–", "–", "–"]
        if found is not None and not found.fits:
            cells = ["does not fit", "–", "–"]
        elif found is not None:
            sent = sum(found.sent_bytes.values())
            cells = [
                format_seconds(found.step_s),
                format_rate(found.samples_per_s),
                format_bytes(sent) if sent else "–",
            ]
        table.add_row(*map(Text, (name, *cells, what)))
    return table


def ranking_json(ranking: Ranking) -> dict[str, Any]:
    """A ranking as plain values."""
    return {
        "plans": [found.as_json() for found in ranking.predictions],
        "rejected": [{"plan": plan, "reason": reason} for plan, reason in folded(ranking.rejected)],
        "relaxed": relaxed(),
        "relaxed_plans": [found.as_json() for found in ranking.relaxed],
        "num_candidates": ranking.num_candidates,
        "num_predicted": ranking.num_predicted,
        "seconds": ranking.seconds,
        "notices": list(ranking.notices),
    }


def scaling_view(title: str, rows: Sequence[Scaled]) -> Group:
    """The table, with a bar for every efficiency."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("devices", "batch", "step", "samples/s", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("plan", overflow="fold")
    for row in rows:
        found = row.prediction
        if found is None or row.efficiency is None:
            table.add_row(str(row.ranks), "", "", "", "–", "", Text(row.reason or ""))
            continue
        bar = "█" * max(1, round(min(row.efficiency, 1.5) * _BAR / 1.5))
        table.add_row(
            str(row.ranks), str(found.batch), format_seconds(found.step_s), format_rate(found.samples_per_s),
            f"{row.efficiency:.2f}", Text(bar, "cyan"), Text(describe(found.plan)),
        )  # fmt: skip
    return Group(Text(title, "bold"), table)


def scaling_json(rows: Sequence[Scaled]) -> list[dict[str, Any]]:
    """The table as plain values."""
    return [
        {
            "ranks": row.ranks,
            "efficiency": row.efficiency,
            "reason": row.reason,
            "prediction": None if row.prediction is None else row.prediction.as_json(),
        }
        for row in rows
    ]
