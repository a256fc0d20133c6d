"""`plait lr`: which learning rate, by a short run whose rate grows.

In: options. Out: two numbers and a picture; or JSON.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

import plait
from plait.cli.console import plain_console, prints_aside
from plait.cli.flatten import flattened
from plait.cli.options import TEXTS, DeviceOption, How, JobArgument, JsonOption, look_first
from plait.files.write import write_named
from plait.options import Changes


@flattened(TEXTS)
def lr(
    job: JobArgument,
    *,
    how: How,
    changes: Changes,
    lowest: Annotated[float, typer.Option(help="The learning rate of the first step.")] = 1e-6,
    highest: Annotated[float, typer.Option(help="Of the last step, if the loss bears it.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps, each with a rate larger by the same factor.")] = 100,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("lr.svg"),
    device: DeviceOption = "cpu",
    json_: JsonOption = False,
) -> None:
    """Train JOB for some steps with a learning rate that grows, and tell which one to use."""
    look_first(job, how, changes)
    told = plain_console(to_stderr=json_)
    with prints_aside(json_):
        found = plait.find_lr(
            job, how.plan, how.ranks, lowest=lowest, highest=highest, steps=steps, changes=changes,
            device=device,
        )  # fmt: skip
        write_named(out, found.picture())
    if json_:
        curve = {"rates": found.rates, "losses": found.losses}
        print(json.dumps({"steepest": found.steepest, "lowest": found.lowest, "picture": str(out), **curve}))
        return
    told.print(f"the loss falls fastest at a learning rate of {found.steepest:.2g}: train with it")
    told.print(f"it is lowest at {found.lowest:.2g}, and grows from there on: over the edge", highlight=False)
    told.print(f"wrote {out}: {len(found.losses)} steps from {found.rates[0]:.2g} to {found.rates[-1]:.2g}")
