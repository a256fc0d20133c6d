"""How far predictions are from published measurements, for a console and as plain values.

In: a `Validation`. Out: a table for every source, or a mapping with every case. It decides nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from plait.api.validate import Validation
from plait.search.published.case import BadLine
from plait.search.published.compare import Errors, SourceSummary
from plait.search.published.predictor import Outcome

_REASONS = 6
"""Reasons for skipping that are shown for a source."""


def tables(summaries: Sequence[SourceSummary]) -> list[Table]:
    """Step times; memory; the rest."""
    return [
        table
        for table in (_step_table(summaries), _memory_table(summaries), _other_table(summaries))
        if table.row_count
    ]


def _step_table(summaries: Sequence[SourceSummary]) -> Table:
    table = Table(title="Step time", box=box.SIMPLE, title_justify="left")
    table.add_column("source", overflow="fold", min_width=20)
    for name in ("predicted", "median", "mean", "bias", "rank", "naive"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        step, naive = summary.errors.get("step"), summary.naive
        if step is not None and naive is not None:
            rank = "" if summary.rank is None else f"{summary.rank:.3f}"
            table.add_row(
                summary.source, f"{summary.num_predicted}/{summary.num_cases}", *_percents(step), rank,
                f"{naive.median:.1%}",
            )  # fmt: skip
    return table


def _memory_table(summaries: Sequence[SourceSummary]) -> Table:
    table = Table(title="Memory", box=box.SIMPLE, title_justify="left")
    table.add_column("source", overflow="fold", min_width=20)
    for name in ("measured", "median", "mean", "bias", "failed\nrejected", "good\nrejected"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        memory = summary.errors.get("memory")
        if memory is None and not summary.num_failed:
            continue
        errors = ("0", "", "", "") if memory is None else (str(memory.count), *_percents(memory))
        table.add_row(
            summary.source, *errors, _share(summary.num_failed_rejected, summary.num_failed),
            _share(summary.num_good_rejected, summary.num_good),
        )  # fmt: skip
    return table


def _other_table(summaries: Sequence[SourceSummary]) -> Table:
    table = Table(title="Other measurements", box=box.SIMPLE, title_justify="left")
    table.add_column("source", overflow="fold", min_width=20)
    for name in ("what", "numbers", "median", "mean", "bias"):
        table.add_column(name, justify="right", no_wrap=True)
    names = {"layer": "time of a layer", "bubble": "idle share", "bus": "bus bandwidth"}
    for summary in summaries:
        for what, name in names.items():
            if what in summary.errors:
                errors = summary.errors[what]
                table.add_row(summary.source, name, str(errors.count), *_percents(errors))
    return table


def _percents(errors: Errors) -> tuple[str, str, str]:
    return f"{errors.median:.1%}", f"{errors.mean:.1%}", f"{errors.bias:+.1%}"


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / whole:.0%})" if whole else ""


def tell_skipped(summaries: Sequence[SourceSummary], bad: Sequence[BadLine], console: Console) -> None:
    """What was not compared, and why."""
    for summary in summaries:
        for reason, count in list(summary.skipped.items())[:_REASONS]:
            console.print(f"skipped {count} of {summary.source}: {reason}", highlight=False, markup=False)
        for reason, count in list(summary.skipped.items())[_REASONS:]:
            console.print(f"skipped {count}: {reason}", highlight=False, markup=False)
    for line in bad:
        console.print(f"line {line.line}: {line.reason}", highlight=False, markup=False)


def validation_json(found: Validation) -> dict[str, Any]:
    """Every case, and the sums."""
    return {
        "sources": [asdict(summary) for summary in found.summaries],
        "cases": [_case_json(outcome) for outcome in found.outcomes],
        "bad_lines": [asdict(line) for line in found.bad_lines],
    }


def _case_json(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    return {
        "id": case.id,
        "kind": case.kind,
        "source": case.source,
        "predicted": outcome.skipped is None,
        "skipped": outcome.skipped,
        "filled_in": list(outcome.notes),
        "unknown_fields": list(case.unknown),
        "compared": [asdict(entry) | {"error": entry.error} for entry in outcome.compared],
        "failed": case.failed,
        "rejected": outcome.rejected,
    }
