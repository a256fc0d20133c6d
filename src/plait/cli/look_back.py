"""`plait report`, `plait compare` and `plait export`: what is done with runs that ended.

In: run folders. Out: tables or JSON; a file with the trained weights.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

import plait
from plait.cli.console import plain_console
from plait.cli.options import JsonOption
from plait.errors import UsageError
from plait.options import Exported
from plait.units import format_bytes, format_seconds


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    json_: JsonOption = False,
) -> None:
    """Show where the time of a run went, per rank, and how the loss fell."""
    if not folder.is_dir():
        raise UsageError(f"there is no run folder {folder}.", fix="give the folder that plait run printed.")
    from plait.report.text import print_report, report_json

    if json_:
        print(json.dumps(report_json(folder)))
    else:
        print_report(folder, plain_console())


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, the first to compare with.")
    ],
    json_: JsonOption = False,
) -> None:
    """Show runs side by side: plan, speed, memory, loss."""
    found = plait.compare(*folders)
    if json_:
        print(json.dumps([asdict(row) | {"speed": found.speed(i)} for i, row in enumerate(found.rows)]))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("run", overflow="fold", min_width=5)
    table.add_column("plan", overflow="fold", min_width=4)
    for name in ("ranks", "batch", "steps", "step", "samples/s", "speed", "memory", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(found.rows):
        speed = found.speed(i)
        numbers = (row.ranks, row.batch, row.num_steps)
        table.add_row(
            row.name, row.plan or "–", *("–" if value is None else str(value) for value in numbers),
            "–" if row.step_s is None else format_seconds(row.step_s),
            "–" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}",
            "–" if speed is None else f"{speed:.2f}x",
            "–" if row.memory_bytes is None else format_bytes(row.memory_bytes),
            "–" if row.final_loss is None else f"{row.final_loss:.4g}",
        )  # fmt: skip
    plain_console().print(table)


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder or a checkpoint.")],
    to: Annotated[
        Exported, typer.Option("--to", help="Weights as a file, or the model for another tool.")
    ] = "safetensors",
    out: Annotated[
        Path | None, typer.Option(help="The file or folder to write; beside the run by default.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="For huggingface and onnx, of a run that was started without a name."
        ),
    ] = None,
    trust_job: Annotated[
        bool,
        typer.Option(
            "--trust-job",
            help="Build the model of the job that the folder names, even if changed or another's.",
        ),
    ] = False,
) -> None:
    """Write the trained weights under the model's own names, or the model as other tools take it."""
    path = plait.export(folder, to=to, out=out, job=job, trust_job=trust_job)
    plain_console().print(f"wrote {path}")
