"""`plait plan`: which plan, how fast, does it fit, and why.

In: what a person asked for on the command line. Out: tables or JSON, a plan file, the configuration of another system.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import plait
from plait.api.inputs.settings import write_arguments
from plait.cli.console import plain_console, prints_aside, speaks_elsewhere
from plait.cli.engine import COMMAND_LINE, start
from plait.cli.flatten import Text as FieldText
from plait.cli.flatten import flattened
from plait.cli.options import (
    TEXTS,
    DryRunOption,
    How,
    JsonOption,
    look_first,
    parse_counts,
)
from plait.errors import PlanError, UsageError
from plait.files.write import write_named
from plait.options import SYSTEMS, Changes, Elsewhere, Search

if TYPE_CHECKING:
    from plait.search.choose.scaling import Scaled


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """What is planned."""

    model: str | None = None
    """A model on paper instead: gpt3-175b, gpt:layers=24,..."""
    cluster: str = "this"
    """8xA100, 64x8xH100, a YAML file, or `this` after plait measure."""
    batch: int | None = None
    """Samples a step, over all devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What is shown and written of the first plan."""

    explain: bool = False
    """Say why the first plan beats the second."""
    out: Path | None = None
    """Write the first plan to this file."""
    export: str | None = None
    """Write it for another system."""

    def __post_init__(self) -> None:
        if self.export is not None and self.export not in SYSTEMS:
            raise UsageError(
                f"--export {self.export!r} is not known.", fix=f"use one of {', '.join(SYSTEMS)}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scaling:
    """A scaling table instead."""

    scale: Sequence[int] = ()
    """Over these numbers of devices."""
    same_batch: bool = False
    """One batch for all, not one a device."""
    svg: Path | None = None
    """Draw it to this file."""

    def __post_init__(self) -> None:
        if (self.svg is not None or self.same_batch) and not self.scale:
            raise UsageError("--svg and --same-batch belong to a scaling table.", fix="add --scale 1,2,4,8.")


_TEXTS = {
    **{name: TEXTS[name] for name in ("args", "engine_set")},
    "settings": replace(TEXTS["settings"], help="Change the job: batch=128."),
    "model": FieldText(type=str, metavar="NAME[:KEY=VALUE,...]"),
    "export": FieldText(type=str, help=f"Write it for another system: {', '.join(SYSTEMS)}."),
    "scale": FieldText(type=str, metavar="N,N,...", read=parse_counts),
}
"""Fields that are written in a way of their own."""


@flattened(_TEXTS, without=("mesh",))
def plan_(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="path.py[:function] or module:function.")
    ] = None,
    *,
    subject: _Subject,
    search: Search,
    changes: Changes,
    wanted: _Wanted,
    scaling: _Scaling,
    elsewhere: Elsewhere,
    dry_run: DryRunOption = False,
    json_: JsonOption = False,
) -> None:
    """Rank the plans for JOB on a cluster: step time, memory, money; what does not fit, and why.

    Started by an engine, `this` is the hosts that it found, whose links are measured first.
    """
    if elsewhere.engine is not None:
        raise typer.Exit(
            start(elsewhere, search.ranks, COMMAND_LINE, dry_run=dry_run, name="plan", out=None, runs=False)
        )
    look_first(job, How(plan=search.plan), Changes())
    what: dict[str, Any] = {
        "job": job, "model": subject.model, "cluster": subject.cluster, "batch": subject.batch, "changes": changes,
        "search": search,
    }  # fmt: skip
    if scaling.scale:
        with prints_aside(json_):
            rows = plait.scale(scaling.scale, same_batch=scaling.same_batch, **what)
        if not speaks_elsewhere():
            _show_scaling(rows, job or str(subject.model), subject.cluster, scaling, json_)
        return
    with prints_aside(json_):
        choice = plait.choose(**what)
    if not speaks_elsewhere():
        _show(choice, _written(choice, wanted, job, changes, subject.cluster), wanted.explain, json_)


def _written(
    choice: "plait.Choice", wanted: _Wanted, job: str | None, changes: Changes, cluster: str
) -> list[str]:
    """Write the files that are wanted, and say what they are for."""
    if wanted.export is not None:
        return list(plait.export_plan(choice, wanted.export, wanted.out))
    if wanted.out is None:
        return []
    write_named(wanted.out, choice.to_yaml())
    named = job and " ".join([job, *(f"--arg {entry}" for entry in write_arguments(changes.args))])
    return [f"wrote {wanted.out}: {choice.to_use(wanted.out, named, cluster)}"]


def _show_scaling(rows: "Sequence[Scaled]", name: str, cluster: str, asked: _Scaling, json_: bool) -> None:
    from plait.cli.views.plan import (  # torch takes seconds: help does not wait for it
        scaling_json,
        scaling_view,
    )
    from plait.report.scaling_picture import scaling_picture

    console = plain_console()
    title = f"{name} on {cluster}: {'one batch' if asked.same_batch else 'batch grows with devices'}"
    if json_:
        print(json.dumps(scaling_json(rows)))
    else:
        console.print(scaling_view(title, rows))
    if asked.svg is None:
        return
    points = [(row.ranks, row.prediction.samples_per_s) for row in rows if row.prediction is not None]
    if not points:
        raise PlanError("no number of devices has a plan that fits.", fix="use more devices or less batch.")
    write_named(asked.svg, scaling_picture(title, points))
    if not json_:
        console.print(f"wrote {asked.svg}")


def _show(choice: "plait.Choice", written: list[str], explain: bool, json_: bool) -> None:
    from plait.cli.views.plan import ranking_json, ranking_view  # likewise

    console = plain_console()
    best = choice.best
    if json_:
        said = ranking_json(choice.ranking) | {"explained": choice.why, "written": written}
        print(json.dumps(said))
        return
    title = f"{choice.subject.name}  batch {best.batch} on {best.cluster.title}"
    console.print(ranking_view(title, choice.ranking, best.limit_bytes))
    if explain:
        console.print(Text("Why the first", "bold"))
        for line in choice.why:
            console.print(Text(line), soft_wrap=True)
    for line in written:
        console.print(Text(line), soft_wrap=True)
