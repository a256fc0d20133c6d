"""The report of a run as one page that opens offline.

In: a run folder. Out: `<run>/report.html`, its styles, drawings and script inside it. It asks the network
for nothing, and says so to the browser. Every string of the run is escaped; the script puts them in as text,
never as markup.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from plait.files.write import write_whole
from plait.report.breakdown import PARTS, RankBreakdown, breakdown
from plait.report.charts import Line, line_chart, stacked_bar
from plait.report.graphs import graphs_of, graphs_section
from plait.report.page_timeline import timeline_section
from plait.report.record import RunRecord, read_run
from plait.report.summary import Summary, compilation_of, series, summarize
from plait.report.text import environment_line, plan_name
from plait.report.traffic import traffic_of, traffic_section
from plait.trace.span import Trace
from plait.units import format_bytes, format_seconds

PART_NAMES = {
    "data_s": ("data", "Data"),
    "forward_s": ("forward", "Forward"),
    "backward_s": ("backward", "Backward"),
    "exposed_communication_s": ("wait", "Exposed communication"),
    "update_s": ("update", "Update"),
    "other_s": ("host", "Evaluation, checkpoints, host"),
    "idle_s": ("idle", "Idle"),
}
"""For each part of a step: its class in the style sheet, and its name for people."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the page may load: itself."""


def write_page(run_dir: Path) -> Path:
    """Write `report.html` into a run folder and say where it is."""
    record = read_run(run_dir)
    path = record.folder / "report.html"
    write_whole(path, page(record))
    return path


def page(record: RunRecord) -> str:
    """The whole document."""
    summary = summarize(record)
    ranks = breakdown(record.trace) if record.trace else []
    title = f"plait run {record.folder.resolve().name}"
    facts = [fact for fact in (_plan_fact(record), environment_line(record)) if fact]
    parts = [
        _cards(summary, ranks, compilation_of(record)),
        _notes(record),
        _charts(record),
        _breakdown(record.trace, ranks),
        traffic_section(traffic_of(record)),
        graphs_section(graphs_of(record)),
        timeline_section(record.trace),
        _details("Plan", record.plan),
        _details("Environment", json.dumps(record.environment, indent=2) if record.environment else None),
    ]
    return document(title, facts, parts)


def document(title: str, facts: Sequence[str], parts: Sequence[str]) -> str:
    """A page with its styles and script inside: a heading, what there is to say in a line, and sections."""
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(' · '.join(facts))}</p></header><main>",
        *parts,
        "</main>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>"
        f'{"".join(body)}<div id="tip" role="status" hidden></div>'
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("plait.report").joinpath("assets", name).read_text(encoding="utf-8")


def _plan_fact(record: RunRecord) -> str | None:
    name = plan_name(record)
    if name is None or record.trace is None:
        return f"plan {name}" if name else None
    count = len(record.trace.ranks)
    return f"plan {name} on {count} {'rank' if count == 1 else 'ranks'}"


def _cards(summary: Summary, ranks: Sequence[RankBreakdown], compilation: tuple[str, str] | None) -> str:
    cards: list[tuple[str, str, str]] = []
    if summary.final_loss is not None:
        cards.append(("Final loss", f"{summary.final_loss:.4g}", f"from {summary.first_loss:.4g}"))
    for best in summary.best[:2]:
        when = "" if best.step is None else f"step {best.step + 1}"
        cards.append((f"Best evaluation {best.metric}", f"{best.value:.4g}", when))
    if summary.samples_per_s is not None:
        cards.append(("Throughput", f"{summary.samples_per_s:,.4g}", "samples/s"))
    if ranks:
        slowest = max(ranks, key=lambda one: one.step_s)
        exposed = max(one.share("exposed_communication_s") for one in ranks)
        cards.append(("Step", format_seconds(slowest.step_s), f"mean of {slowest.num_steps}, slowest rank"))
        cards.append(("Exposed communication", f"{exposed:.0%}", "of the step, worst rank"))
    if summary.num_steps is not None:
        epochs = "" if summary.num_epochs is None else f"epoch {summary.num_epochs:,}"
        cards.append(("Steps", f"{summary.num_steps:,}", epochs))
    if summary.peak_memory_bytes is not None:
        cards.append(("Memory", format_bytes(summary.peak_memory_bytes), "at most"))
    if compilation is not None:
        cards.append(("Compilation", *compilation))
    items = "".join(
        f"<div class='card'><dt>{escape(name)}</dt>"
        f"<dd>{escape(value)}<small>{escape(about)}</small></dd></div>"
        for name, value, about in cards
    )
    return f"<dl class='cards'>{items}</dl>" if items else ""


def _notes(record: RunRecord) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in record.notes)
    return f"<ul class='notes' aria-label='What is missing'>{items}</ul>" if items else ""


def _charts(record: RunRecord) -> str:
    evaluated = [{"step": line.get("step"), **line["evaluate"]} for line in record.evaluations]
    loss = line_chart(
        "Loss",
        [
            Line(name="training loss", points=series(record.metrics, "loss"), style="first"),
            Line(name="evaluation loss", points=series(evaluated, "loss"), style="second dots"),
        ],
    )
    rate = line_chart(
        "Throughput",
        [Line(name="samples/s", points=series(record.metrics, "samples_per_s"), style="first")],
        from_zero=True,
    )
    key = "<span class='key first'>training</span>"
    if series(evaluated, "loss"):
        key += "<span class='key second'>evaluation</span>"
    return (
        f"<div class='pair'><section><h2>Loss {key}</h2>{loss}</section>"
        f"<section><h2>Throughput <span class='unit'>samples/s</span></h2>{rate}</section></div>"
    )


def _breakdown(trace: Trace | None, ranks: Sequence[RankBreakdown]) -> str:
    if trace is None or not ranks:
        return ""
    longest = max(one.step_s for one in ranks)
    rows = []
    for one in ranks:
        parts = [
            (
                f"kind-{PART_NAMES[part][0]}",
                f"{PART_NAMES[part][1]}: {format_seconds(getattr(one, part))}, {one.share(part):.1%} of step",
                float(getattr(one, part)),
            )
            for part in PARTS
        ]
        spoken = f"rank {one.rank}: " + ", ".join(text for _, text, amount in parts if amount > 0)
        bar = stacked_bar(spoken, parts, whole=one.step_s, longest=longest)
        step = format_seconds(one.step_s)
        rows.append(
            f"<div class='rank'><span>rank {one.rank}</span>{bar}"
            f"<span class='number'>{escape(step)}</span></div>"
        )
    used = [part for part in PARTS if any(getattr(one, part) > 0 for one in ranks)]
    legend = "".join(
        f"<span class='key kind-{PART_NAMES[part][0]}'>{escape(PART_NAMES[part][1])}</span>" for part in used
    )
    return (
        f"<section><h2>Where a step goes <span class='unit'>{escape(trace.source)}, "
        f"mean of {ranks[0].num_steps} step(s)</span></h2><p class='legend'>{legend}</p>"
        f"<div class='ranks'>{''.join(rows)}</div>{_table(ranks)}</section>"
    )


def _table(ranks: Sequence[RankBreakdown]) -> str:
    heads = [
        "Rank",
        "Step",
        *(PART_NAMES[part][1] for part in PARTS),
        "Hidden communication",
        "Bytes per step",
    ]
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in heads)
    rows = []
    for one in ranks:
        cells = [format_seconds(one.step_s)]
        cells += [f"{format_seconds(getattr(one, part))} ({one.share(part):.1%})" for part in PARTS]
        cells += [
            format_seconds(one.hidden_communication_s),
            format_bytes(one.communicated_bytes / one.num_steps),
        ]
        rows.append(
            f"<tr><th scope='row'>{one.rank}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        )
    return (
        "<details><summary>As a table</summary><div class='scroll'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _details(name: str, text: str | None) -> str:
    return f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>" if text else ""
