"""The report of a run, for a terminal.

In: a run folder. Out: rich tables on a console: summary, evaluations, breakdown and timeline of a step.
Strings of the user are printed as they are, never as markup. `report_json` is the same content for machines.
"""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.report.breakdown import PARTS, RankBreakdown, breakdown
from plait.report.graphs import graph_rows, graphs_of
from plait.report.record import RunRecord, read_run
from plait.report.summary import Summary, compilation_of, report_json, summarize
from plait.report.timeline import timeline, typical_step
from plait.report.traffic import Traffic, staleness_table, traffic_of, traffic_rows
from plait.trace.span import SpanKind, Trace
from plait.units import format_bytes, format_seconds

__all__ = ["print_report", "report_json"]

_GLYPHS: dict[SpanKind, tuple[str, str, str]] = {
    "data": ("▄", "yellow", "data"),
    "forward": ("█", "blue", "forward"),
    "backward": ("▓", "magenta", "backward"),
    "communication": ("▬", "green", "communication"),
    "wait": ("░", "red", "exposed communication"),
    "update": ("▀", "cyan", "update"),
    "host": ("▪", "white", "host"),
    "evaluate": ("▪", "white", "evaluate"),
    "checkpoint": ("▪", "white", "checkpoint"),
}
_FREE = "·"
_HEADINGS = {
    "data_s": "data",
    "forward_s": "forward",
    "backward_s": "backward",
    "exposed_communication_s": "exposed",
    "update_s": "update",
    "other_s": "other",
    "idle_s": "idle",
}
_MAX_RANKS = 8
"""Ranks whose lanes are drawn in a terminal; the page shows all of them."""
_MAX_EVALUATIONS = 10
"""Evaluations that are listed: the latest ones."""


def print_report(run_dir: Path, console: Console) -> None:
    """Print all that a run folder tells, and what it lacks."""
    record = read_run(run_dir)
    console.print(Text(f"Run {record.folder}", style="bold"), soft_wrap=True)
    traffic = traffic_of(record)
    console.print(_summary_table(record, summarize(record), traffic))
    if traffic.staleness:
        console.print(staleness_table(traffic))
    if record.evaluations:
        console.print(_evaluation_table(record))
    if record.trace is not None and record.trace.spans:
        console.print(breakdown_table(breakdown(record.trace), source=record.trace.source))
        print_timeline(record.trace, console)
    for note in record.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def breakdown_table(ranks: Sequence[RankBreakdown], *, source: str) -> Table:
    """The mean step of every rank: its parts in one unit, and their share of the step under them."""
    longest_s = max((one.step_s for one in ranks), default=0.0)
    unit, size = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if longest_s >= pair[1]), ("us", 1e-6))
    steps = f"mean of {ranks[0].num_steps} steps" if ranks else "no steps"
    parts = [part for part in PARTS if part != "other_s" or any(one.other_s > 0 for one in ranks)]
    caption = "exposed: the rank waited for communication; hidden: communication beside the computation"
    if "other_s" in parts:
        caption += "; other: evaluation, checkpoints, host work"
    table = Table(
        title=f"Where a step goes, in {unit} ({source}, {steps})",
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        padding=0,
    )
    for heading in ("rank", "step", *(_HEADINGS[part] for part in parts), "hidden", "sent"):
        style = "dim" if heading in ("hidden", "sent") else ""
        table.add_column(heading, justify="right", style=style, no_wrap=True)
    for one in ranks:
        table.add_row(
            str(one.rank),
            f"{one.step_s / size:.3g}\n100%",
            *(f"{getattr(one, part) / size:.3g}\n{one.share(part):.0%}" for part in parts),
            f"{one.hidden_communication_s / size:.3g}",
            format_bytes(one.communicated_bytes / one.num_steps),
        )
    return table


def print_timeline(trace: Trace, console: Console, *, step: int | None = None) -> None:
    """Print the lanes of one step, by default the typical one; what is one above the other overlaps."""
    chosen = typical_step(trace) if step is None else step
    if chosen is None:
        return
    label = len(f"rank {max(trace.ranks)} communication ")
    drawn = timeline(trace, step=chosen, num_cells=max(20, min(160, console.width - label - 1)))
    console.print(Text(f"Step {drawn.step + 1}: {format_seconds(drawn.duration_s)}", style="bold"))
    used: set[SpanKind] = set()
    shown = set(trace.ranks[:_MAX_RANKS])
    for row in drawn.rows:
        if row.rank not in shown:
            continue
        line = Text(f"rank {row.rank} {row.lane}".ljust(label), no_wrap=True)
        for kind in row.cells:
            if kind is None:
                line.append(_FREE, style="dim")
            else:
                used.add(kind)
                line.append(_GLYPHS[kind][0], style=_GLYPHS[kind][1])
        console.print(line)
    legend = Text()
    for kind, (glyph, style, name) in _GLYPHS.items():
        if kind in used:
            legend.append(glyph * 2, style=style).append(f" {name}   ")
    console.print(legend.append(_FREE * 2, style="dim").append(" free"))
    if len(trace.ranks) > _MAX_RANKS:
        console.print(f"{len(trace.ranks) - _MAX_RANKS} more ranks are in the page and in trace/trace.json.")


def _summary_table(record: RunRecord, summary: Summary, traffic: Traffic) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()

    def row(name: str, value: str | None) -> None:
        if value is not None:
            table.add_row(name, Text(value))

    row("plan", plan_name(record))
    row("steps", None if summary.num_steps is None else _steps(summary))
    if summary.final_loss is not None and summary.first_loss is not None:
        row("loss", f"{summary.first_loss:.5g} → {summary.final_loss:.5g}")
    row("throughput", None if summary.samples_per_s is None else f"{summary.samples_per_s:,.4g} samples/s")
    row(
        "memory",
        None if summary.peak_memory_bytes is None else f"{format_bytes(summary.peak_memory_bytes)} at most",
    )
    for name, value in (*traffic_rows(traffic), *graph_rows(graphs_of(record))):
        row(name, value)
    if (compilation := compilation_of(record)) is not None:
        row("compilation", ", ".join(compilation))
    for best in summary.best:
        when = "" if best.step is None else f" (step {best.step + 1})"
        final = summary.final_evaluation.get(best.metric)
        last = "" if final is None else f", last {final:.5g}"
        row(f"evaluate {best.metric}", f"best {best.value:.5g}{when}{last}")
    row("environment", environment_line(record))
    return table


def _steps(summary: Summary) -> str:
    return f"{summary.num_steps:,}" + (
        "" if summary.num_epochs is None else f" (epoch {summary.num_epochs:,})"
    )


def plan_name(record: RunRecord) -> str | None:
    """The plan's name, or its first line where it has none."""
    lines = [line for line in (record.plan or "").splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        key, _, value = line.partition(":")
        if key in ("name", "plan") and value.strip():
            return value.strip().strip("\"'")
    return lines[0].strip() if lines else None


def environment_line(record: RunRecord) -> str | None:
    """The plain facts of the environment in one line: `torch 2.13.0, python 3.12.1, device cpu`."""
    facts = [
        f"{key} {value}" for key, value in record.environment.items() if isinstance(value, str | int | float)
    ]
    return ", ".join(facts[:8]) or None


def _evaluation_table(record: RunRecord) -> Table:
    latest = record.evaluations[-_MAX_EVALUATIONS:]
    names = list(dict.fromkeys(name for line in latest for name in line["evaluate"]))
    of = (
        f" (the last {len(latest)} of {len(record.evaluations)})"
        if len(record.evaluations) > len(latest)
        else ""
    )
    table = Table(title=f"Evaluation{of}", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("step", justify="right")
    for name in names:
        table.add_column(Text(str(name)), justify="right")
    for line in latest:
        values = [line["evaluate"].get(name) for name in names]
        table.add_row(
            str(line["step"] + 1) if line.get("step") is not None else "",
            *(
                Text(f"{value:.5g}" if isinstance(value, int | float) else str(value or ""))
                for value in values
            ),
        )
    return table
