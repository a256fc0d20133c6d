"""`plait verify`: does a plan compute what one process computes.

In: a job's reference and a plan. Out: what was compared, how far apart it was, and the first tensor that differs; the
exit code is 1 where there is one.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import plait
from plait.api.display.progress import show_progress
from plait.cli.console import plain_console, prints_aside, speaks_elsewhere
from plait.cli.engine import COMMAND_LINE, check_here, start
from plait.cli.flatten import flattened
from plait.cli.options import (
    TEXTS,
    DeviceOption,
    DryRunOption,
    EmulateOption,
    How,
    JobArgument,
    JsonOption,
    look_first,
    num_ranks,
)
from plait.options import Changes, Elsewhere

if TYPE_CHECKING:
    from plait.run.proof.compare import Difference
    from plait.run.verify import Verification

_EAGER, _PLAN = "your code / one process", "one process / plan"
_DRAWS = "torch's random numbers / plait's"


@flattened(TEXTS)
def verify(
    job: JobArgument,
    *,
    how: How,
    changes: Changes,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 3,
    fp32: Annotated[bool, typer.Option("--fp32", help="Compare in float32 instead of float64.")] = False,
    serial: Annotated[bool, typer.Option("--serial", help="All ranks in this process; 64 are fine.")] = False,
    device: DeviceOption = "cpu",
    emulate: EmulateOption = None,
    elsewhere: Elsewhere,
    dry_run: DryRunOption = False,
    json_: JsonOption = False,
) -> None:
    """Run JOB both ways, under a plan and on one process, and compare loss, gradients, weights and buffers."""
    if elsewhere.engine is not None:
        name = Path(job.split(":")[0]).stem
        raise typer.Exit(
            start(
                elsewhere,
                num_ranks(how, changes),
                COMMAND_LINE,
                dry_run=dry_run,
                name=name,
                out=None,
                runs=False,
            )
        )
    check_here(elsewhere, dry_run=dry_run)
    look_first(job, how, changes)
    is_silent, console = not serial and speaks_elsewhere(), plain_console(to_stderr=json_)
    with prints_aside(json_), show_progress(console, quiet=json_ or is_silent) as listener:
        outcome = plait.verify(
            job, how.plan, how.ranks, changes=changes,
            steps=steps, fp32=fp32, serial=serial,
            device=device, emulate=emulate, listener=listener,
        )  # fmt: skip
    if not is_silent:
        print_verification(outcome, plain_console(), json_output=json_)
    raise typer.Exit(0 if outcome.ok else 1)


def print_verification(outcome: "Verification", console: Console, *, json_output: bool) -> None:
    """A table for people, or JSON."""
    if json_output:
        print(json.dumps(_as_json(outcome)))
        return
    how = "all ranks in one process" if outcome.serial else "real processes"
    axes = " x ".join(f"{name}={size}" for name, size in outcome.plan.mesh.axes)
    table = Table(
        title=f"{outcome.plan.name} ({axes}, {how}) against one process: {outcome.steps} steps in {outcome.dtype}"
    )
    for column in ("sides", "what", "largest relative difference", "tolerance", "where", ""):
        table.add_column(column, overflow="fold", no_wrap=column == "tolerance")
    for sides, differences in (
        (_EAGER, outcome.eager),
        (_DRAWS, outcome.draws),
        (_PLAN, outcome.differences),
    ):
        for difference in differences:
            mark = Text("ok", style="green") if difference.ok else Text("differs", style="red")
            numbers = f"{difference.largest:.1e}", f"{difference.tolerance:.0e}"
            table.add_row(sides, difference.kind, *numbers, difference.name, mark)
    console.print(table)
    for notice in outcome.notices:
        console.print(f"notice: {notice}", highlight=False, soft_wrap=True)
    if outcome.ok:
        console.print(Text.assemble(("equal", "green"), f": {_said(outcome)}."), soft_wrap=True)
    for sides, first in (
        (_EAGER, outcome.eager_first),
        (_DRAWS, outcome.draws_first),
        (_PLAN, outcome.first),
    ):
        if first is not None:
            what = "the first" if sides == _DRAWS else "the first tensor"
            told = (
                f": {sides}: {what} that differs is the {first.kind} {first.name}: "
                f"{first.largest:.3e} over a tolerance of {first.tolerance:.0e}."
            )
            console.print(Text.assemble(("not equal", "red"), told), soft_wrap=True)


def _said(outcome: "Verification") -> str:
    """What was proven."""
    own = "what your own code computes in a plain loop" if outcome.eager else ""
    if outcome.deviation is None:
        return "the plan computes what one process computes" + (own and f", which is {own}")
    return "processes compute what all ranks of the plan compute in one" + (
        own and f"; one rank alone computes {own}"
    )


def _as_json(outcome: "Verification") -> dict[str, object]:
    def entry(difference: "Difference | None") -> dict[str, object] | None:
        if difference is None:
            return None
        return {
            "kind": difference.kind, "name": difference.name,
            "largest": difference.largest if math.isfinite(difference.largest) else None,
            "tolerance": difference.tolerance, "ok": difference.ok,
        }  # fmt: skip

    return {
        "ok": outcome.ok,
        "plan": outcome.plan.name,
        "mesh": dict(outcome.plan.mesh.axes),
        "steps": outcome.steps,
        "dtype": outcome.dtype,
        "serial": outcome.serial,
        "deviation": outcome.deviation,
        "differences": [entry(difference) for difference in outcome.differences],
        "first": entry(outcome.first),
        "eager": [entry(difference) for difference in outcome.eager],
        "eager_first": entry(outcome.eager_first),
        "draws": [entry(difference) for difference in outcome.draws],
        "draws_first": entry(outcome.draws_first),
        "notices": list(outcome.notices),
    }
