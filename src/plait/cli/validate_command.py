"""`plait validate`: how far predictions are from published measurements.

In: a file of cases, one JSON object a line. Out: a table for every source, or JSON with every case. What cannot be read
or predicted is counted and told with its reason, never fatal.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import plait
from plait.cli.console import plain_console
from plait.cli.options import JsonOption


def validate(
    cases: Annotated[Path, typer.Argument(metavar="CASES.jsonl", help="Published measurements, one a line.")],
    json_: JsonOption = False,
) -> None:
    """Predict published measurements and show how far off the predictions are."""
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=plain_console(to_stderr=True), transient=True) as progress:
        task = progress.add_task("predicting", total=None)
        found = plait.validate(
            cases, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    from plait.cli.views.validate import (  # after torch, which takes seconds
        tables,
        tell_skipped,
        validation_json,
    )

    if json_:
        print(json.dumps(validation_json(found), indent=1))
    else:
        console = plain_console()
        for table in tables(found.summaries):
            console.print(table)
        tell_skipped(found.summaries, found.bad_lines, console)
    raise typer.Exit(0 if found.outcomes else 1)
