"""`plait predict`: how fast a job runs under a plan on a cluster, and whether it fits, without running it.

In: a job's reference, a plan, a cluster. Out: numbers on the console or as JSON; the exit code is 1 where the plan does
not fit. Without a cluster it is this machine: as `plait measure` found it, else measured shortly.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plait.cli.options import job_with
from plait.cluster.cluster import Cluster
from plait.cluster.files import read_cluster, read_measured, write_cluster
from plait.cluster.parse import THIS, measured_path, parse_cluster
from plait.errors import UsageError
from plait.job.reference import load_job
from plait.plan.named import resolve
from plait.run.measure.machine import measure_machine
from plait.run.measure.predict import Predicted, predict_job
from plait.trace.files import write_chrome
from plait.units import format_bytes, format_seconds, parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the command line says."""

    plan: str | None
    ranks: int | None
    mesh: Mapping[str, int] | None
    cluster: str | None
    memory: str | None
    device: str
    trace: Path | None
    job_settings: Mapping[str, Any]
    plan_settings: Mapping[str, Any]


def predict_command(job_reference: str, asked: Asked, *, json_output: bool, console: Console) -> int:
    """Compile, simulate, tell; 1 where it does not fit."""
    progress = Console(stderr=True) if json_output else console
    plan = resolve(asked.plan, asked.ranks, asked.plan_settings, asked.mesh)
    limit = _limit(asked.memory)
    with progress.status(f"reading {job_reference}") as status:
        job = job_with(load_job(job_reference), asked.job_settings)
        here = asked.cluster in (None, THIS)
        cluster = this_machine(asked.device, status.update) if here else parse_cluster(str(asked.cluster))
        found = predict_job(
            job, plan, cluster, time_on=asked.device if here else None, limit_bytes=limit, tell=status.update
        )
    if here:
        remember(found.cluster)
    if asked.trace is not None:
        write_chrome(found.exact.trace, asked.trace)
    if json_output:
        print(
            json.dumps(
                found.exact.prediction.as_json() | {"job": job_reference, "notices": list(found.notices)}
            )
        )
    else:
        print_prediction(found, console)
    return 0 if found.exact.prediction.fits else 1


def _limit(text: str | None) -> int | None:
    try:
        return parse_bytes(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"--memory: {error}.", fix="write it like 70GiB.") from error


def this_machine(device: str, tell: Any) -> Cluster:
    """This machine, measured now if it was not before."""
    path = measured_path()
    if path.exists():
        known = read_cluster(path)
        if known.device.name.startswith("cpu") == (device == "cpu"):
            return known
    measured = measure_machine(device, lambda event: tell(event.get("stage", "measuring")))
    write_cluster(measured.cluster, path, measured.notes)
    return measured.cluster


def remember(cluster: Cluster) -> None:
    """Keep what was timed for the next prediction."""
    path = measured_path()
    write_cluster(cluster, path, read_measured(path))


def print_prediction(found: Predicted, console: Console) -> None:
    """A prediction for people."""
    p = found.exact.prediction
    mesh = ", ".join(f"{name}={size}" for name, size in p.plan.mesh.axes)
    table = Table("what", "value", title=f"{p.plan.name} ({mesh}) on {p.cluster.name}", title_justify="left")
    sent = "  ".join(f"{axis} {format_bytes(count)}" for axis, count in p.sent_bytes.items()) or "nothing"
    memory = p.memory
    rows = {
        "step": format_seconds(p.step_s),
        "samples a second": f"{p.samples_per_s:,.1f}",
        "model FLOP utilization": f"{100 * p.utilization:.1f} %",
        "bubble": f"{100 * p.bubble:.1f} %",
        "exposed communication": format_seconds(p.exposed_s) if p.exposed_s else "none",
        "sent a step and device": sent,
        "memory": f"{format_bytes(memory.total)} of {format_bytes(p.limit_bytes)}",
        **{f"  {kind}": format_bytes(count) for kind, count in asdict(memory).items()},
    }
    if p.cost_per_step is not None:
        rows["cost of 1,000 steps"] = f"{1000 * p.cost_per_step:,.2f}"
    for what, value in rows.items():
        table.add_row(what, value)
    console.print(table)
    for notice in found.notices:
        console.print(f"notice: {notice}", highlight=False, soft_wrap=True)
    if p.fits:
        console.print("[green]fits[/green]")
    else:
        console.print(f"[red]does not fit[/red]: {p.reason}", highlight=False)
