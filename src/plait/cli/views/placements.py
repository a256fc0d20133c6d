"""The placements of a step as tables for a console."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from plait.program.show.listing import Listing, PlacedOp
from plait.units import format_bytes

_NARROW = ("shape", "on a rank", "collective", "axis", "bytes", "change", "line")
"""Columns that are not broken into lines."""
ZERO = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "optimizer state, gradients and parameters",
}


def listing_view(listing: Listing, notices: Sequence[str]) -> list[Any]:
    """Everything but the name of the job, from top to bottom."""
    parts: list[Any] = [Text(facts(listing)), Text()]
    parts += [Text.assemble(("chosen  ", "cyan"), notice) for notice in notices]
    if not listing.axes:
        return [*parts, Text("One rank holds and computes everything.")]
    parts += [_parameters(listing), _ops(listing), _transfers(listing), _totals(listing), _fallbacks(listing)]
    return parts


def facts(listing: Listing) -> str:
    """The plan in one line."""
    mesh = " x ".join(f"{name}={size}" for name, size in listing.axes) or "1 rank"
    micro = f" in {listing.num_micro_batches} micro-batches" if listing.num_micro_batches > 1 else ""
    zero = f"; {ZERO[listing.zero]} cut over data in flat groups" if listing.zero else ""
    samples = f"{listing.num_samples} samples{' each' if micro else ''}"
    return f"plan {listing.plan} on {mesh}: a step of {samples}{micro}{zero}"


def counted(name: str, count: int) -> str:
    """The name of what occurs so often."""
    return name if count == 1 else f"{name}  ×{count}"


def whole_by_module(ops: Iterable[PlacedOp]) -> dict[tuple[str, str], list[str]]:
    """Ops that every rank does alike, by module and phase."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in ops:
        if entry.is_whole:
            name = entry.key.rsplit(" ", 2)[-2]
            found.setdefault((entry.module, entry.phase), []).append(name)
    return found


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        justify: Any = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in _NARROW)
    return table


def _parameters(listing: Listing) -> Table:
    table = _table(
        "Parameters",
        "name",
        "shape",
        *(name for name, _ in listing.axes),
        "on a rank",
        "bytes",
        right=("bytes",),
    )
    for entry in listing.parameters:
        table.add_row(
            Text(counted(entry.name, entry.count)),
            Text(str(list(entry.shape))),
            *map(Text, entry.placements),
            Text(entry.held),
            format_bytes(entry.num_bytes),
        )
    return table


def _ops(listing: Listing) -> Table:
    table = _table("Ops: inputs -> outputs", "op", *(name for name, _ in listing.axes))
    for entry in listing.ops:
        if not entry.is_whole:
            table.add_row(Text(counted(entry.key, entry.count)), *map(Text, entry.strategies))
    whole = whole_by_module(listing.ops)
    if whole:
        table.add_section()
    for (module, phase), names in whole.items():
        shown = Text(f"{module} {phase} {', '.join(dict.fromkeys(names))}".strip())
        table.add_row(shown, *(Text("whole on every rank", style="dim") for _ in listing.axes))
    return table


def _transfers_title(listing: Listing) -> str:
    several = listing.num_micro_batches > 1
    return "What ranks exchange" + (" for the ops of one micro-batch, and for the step" if several else "")


def _transfers(listing: Listing) -> Table:
    table = _table(
        _transfers_title(listing), "collective", "axis", "bytes", "change", "tensor", "for", "line",
        right=("bytes",),
    )  # fmt: skip
    for entry in listing.transfers:
        if entry.collective != "none":
            table.add_row(
                Text(counted(entry.collective, entry.count), style="magenta"),
                Text(entry.axis),
                format_bytes(entry.num_bytes),
                Text(entry.change or "–"),
                Text(entry.what),
                Text(entry.user or entry.phase or "–"),
                Text(Path(entry.source).name if entry.source else "–"),
            )
    local = [entry for entry in listing.transfers if entry.collective == "none"]
    if not table.row_count:
        table.add_row("nothing")
    if local:
        count = sum(entry.count for entry in local)
        table.caption = (
            f"{count} more {'change' if count == 1 else 'changes'} of placement need no communication: "
            + "; ".join(f"{entry.what} {entry.change}" for entry in local)
        )
        table.caption_justify = "left"
    return table


def _totals(listing: Listing) -> Table:
    right = ("count", "bytes")
    table = _table("Communication of a rank in a step", "axis", "collective", "count", "bytes", right=right)
    for entry in listing.totals:
        table.add_row(
            Text(entry.axis), Text(entry.collective), str(entry.count), format_bytes(entry.num_bytes)
        )
    if not listing.totals:
        table.add_row("none", "", "", "")
    return table


def _fallbacks(listing: Listing) -> Any:
    if not listing.fallbacks:
        return Text(
            "No fallbacks: every op runs by a rule of ours, and no tensor is gathered for want of one.",
            style="green",
        )
    table = _table(
        "Fallbacks: gathered for an op, or run by a rule that is not ours",
        "op", "axis", "bytes", "tensor", "why", "line", right=("bytes",),
    )  # fmt: skip
    for entry in listing.fallbacks:
        table.add_row(
            Text(counted(entry.key, entry.count), style="yellow"),
            Text(entry.axis),
            format_bytes(entry.num_bytes),
            Text(entry.tensor),
            Text(entry.reason),
            Text(Path(entry.source).name if entry.source else "–"),
        )
    return table
