"""`plait validate`: how far predictions are from published measurements.

In: a file of cases, one JSON object a line. Out: a table for every source, or JSON with every case; the exit code. What
cannot be read or predicted is counted and told with its reason, never fatal.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from plait.search.published.case import BadLine, Case, read_case_file
from plait.search.published.compare import Errors, SourceSummary, summarize
from plait.search.published.predictor import Outcome, predict_cases

_REASONS = 6
"""Reasons for skipping that are shown for a source."""


def validate(
    cases: Annotated[Path, typer.Argument(metavar="CASES.jsonl", help="Published measurements, one a line.")],
    json_: Annotated[
        bool, typer.Option("--json", help="Print every case as JSON for a program to read.")
    ] = False,
) -> None:
    """Predict published measurements and show how far off the predictions are."""
    raise typer.Exit(validate_command(cases, json_output=json_, console=Console()))


def validate_command(path: Path, *, json_output: bool, console: Console) -> int:
    """Predict every case of a file."""
    cases, bad = read_case_file(path)
    outcomes = _predict(cases, Console(stderr=True))
    summaries = summarize(outcomes)
    if json_output:
        json.dump(_as_json(outcomes, bad, summaries), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0
    for table in tables(summaries):
        console.print(table)
    _tell_skipped(summaries, bad, console)
    return 0


def _predict(cases: Sequence[Case], console: Console) -> list[Outcome]:
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("predicting", total=len(cases))
        return predict_cases(cases, lambda done, total: progress.update(task, completed=done, total=total))


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
                escape(summary.source), f"{summary.num_predicted}/{summary.num_cases}", *_percents(step), rank,
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
            escape(summary.source), *errors, _share(summary.num_failed_rejected, summary.num_failed),
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
                table.add_row(escape(summary.source), name, str(errors.count), *_percents(errors))
    return table


def _percents(errors: Errors) -> tuple[str, str, str]:
    return f"{errors.median:.1%}", f"{errors.mean:.1%}", f"{errors.bias:+.1%}"


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / whole:.0%})" if whole else ""


def _tell_skipped(summaries: Sequence[SourceSummary], bad: Sequence[BadLine], console: Console) -> None:
    for summary in summaries:
        for reason, count in list(summary.skipped.items())[:_REASONS]:
            console.print(f"skipped {count} of {summary.source}: {reason}", highlight=False, markup=False)
        for reason, count in list(summary.skipped.items())[_REASONS:]:
            console.print(f"skipped {count}: {reason}", highlight=False, markup=False)
    for line in bad:
        console.print(f"line {line.line}: {line.reason}", highlight=False, markup=False)


def _as_json(
    outcomes: Sequence[Outcome], bad: Sequence[BadLine], summaries: Sequence[SourceSummary]
) -> dict[str, Any]:
    return {
        "sources": [asdict(summary) for summary in summaries],
        "cases": [_case_json(outcome) for outcome in outcomes],
        "bad_lines": [asdict(line) for line in bad],
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
