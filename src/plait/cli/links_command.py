"""`plait links`: how fast processes of this machine reach each other, by operation, algorithm and size.

In: numbers of ranks. Out: tables or JSON, and a picture where one is asked for.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

import plait
from plait.cli.console import plain_console, waiting
from plait.cli.options import JsonOption
from plait.files.write import write_named
from plait.report.links_picture import links_picture
from plait.units import format_bytes


def links(
    ranks: Annotated[
        list[int] | None, typer.Option(help="Processes; several times for several. 2 and 4.")
    ] = None,
    operations: Annotated[
        list[str] | None,
        typer.Option(help="A collective, such as all_reduce; several times for several. All."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the times of the first collective against size.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Time collectives between processes of this machine by every algorithm, and try what every backend can do."""
    chosen: dict[str, Any] = {"operations": tuple(operations)} if operations else {}
    console = plain_console()
    with waiting(console, "links") as tell:
        found = plait.links(
            tuple(ranks or (2, 4)), **chosen, listener=lambda event: tell(str(event.get("stage", "links")))
        )
    if svg is not None:
        first, most = found.times[0].operation, max(entry.ranks for entry in found.times)
        lines: dict[str, list[tuple[int, float]]] = {}
        for entry in found.times:
            if (entry.operation, entry.ranks) == (first, most):
                lines.setdefault(entry.algorithm, []).append((entry.num_bytes, entry.seconds))
        fits = {name: found.fits()[first, name, most] for name in lines}
        about = {
            name: f"{fit.start_s * 1e3:.3g} ms, {1e-9 / fit.per_unit_s:.2g} GB/s"
            if fit.per_unit_s > 0
            else ""
            for name, fit in fits.items()
        }
        write_named(svg, links_picture(f"{first} among {most} processes of this machine", lines, about))
    if json_:
        told = {"times": [asdict(e) for e in found.times], "tried": [asdict(e) for e in found.tried]}
        print(json.dumps(told, indent=1))
        return
    for table in (_times(found), _backends(found)):
        console.print(table)


def _times(found: "plait.LinkReport") -> Table:
    sizes = sorted({entry.num_bytes for entry in found.times})
    title = "milliseconds by size; * the quickest. Fitted: latency in ms, bandwidth in GB/s"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=0)
    table.add_column("algorithm", no_wrap=True)
    for name in (*(format_bytes(size).replace(" ", "") for size in sizes), "latency", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    fits = found.fits()
    by_key: dict[tuple[str, int, str], dict[int, float]] = {}
    for entry in found.times:
        by_key.setdefault((entry.operation, entry.ranks, entry.algorithm), {})[entry.num_bytes] = (
            entry.seconds
        )
    before = None
    for (operation, ranks, algorithm), times in by_key.items():
        if before != (operation, ranks):
            table.add_section()
            table.add_row(f"{operation}, {ranks} ranks")
        before = (operation, ranks)
        best = dict(found.best(operation, ranks))
        cells = [f"{times[s] * 1e3:.3g}" + ("*" if best[s] == algorithm else " ") for s in sizes]
        fit = fits[operation, algorithm, ranks]
        table.add_row(f"  {algorithm}", *cells, f"{fit.start_s * 1e3:.3g}", f"{1e-9 / fit.per_unit_s:.2g}")
    return table


def _backends(found: "plait.LinkReport") -> Table:
    backends = list(dict.fromkeys(entry.backend for entry in found.tried))
    why = [f"{e.backend} {e.operation}: {e.why}" for e in found.tried if e.works is False]
    why += list(dict.fromkeys(f"{e.backend}: untried, {e.why}" for e in found.tried if e.works is None))
    table = Table(
        box=box.SIMPLE, title="what backends can do, tried", title_justify="left", caption="\n".join(why)
    )
    table.add_column("operation", no_wrap=True)
    for backend in backends:
        table.add_column(backend, no_wrap=True)
    cells = {(entry.backend, entry.operation): entry for entry in found.tried}
    for operation in dict.fromkeys(entry.operation for entry in found.tried):
        works = [cells[backend, operation].works for backend in backends]
        table.add_row(
            operation, *("untried" if known is None else "yes" if known else "no" for known in works)
        )
    return table
