"""`plait measure`: fit a cluster to this machine and keep it for `--cluster this`.

In: where to write, which devices. Out: a YAML file; on the console what was found, how well it fits, and a notice where
the machine was not quiet.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plait.cli.progress import show_progress
from plait.cluster.files import write_cluster
from plait.cluster.parse import measured_path
from plait.run.measure.machine import Measured, measure_machine
from plait.run.start.device import check_device
from plait.units import format_bytes, format_flops, format_seconds


def measure_command(out: Path | None, device: str, *, json_output: bool, console: Console) -> int:
    """Measure, write, tell."""
    check_device(device)
    with show_progress(Console(stderr=True) if json_output else console, quiet=json_output) as listener:
        measured = measure_machine(device, listener)
    path = out or measured_path()
    write_cluster(measured.cluster, path, measured.notes)
    if json_output:
        print(
            json.dumps({"file": str(path), "cluster": asdict(measured.cluster), "measured": measured.notes})
        )
        return 0
    print_measured(measured, console)
    console.print(
        f"wrote {path}: use it with --cluster {'this' if out is None else path}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def print_measured(measured: Measured, console: Console) -> None:
    """What was found, for people."""
    cluster, notes = measured.cluster, measured.notes
    device, constants = cluster.device, cluster.device.calibration
    table = Table("what", "value", title=f"{cluster.devices_per_host} x {device.name}", title_justify="left")
    for dtype, rate in device.peak_flops.items():
        table.add_row(f"matrix products, {dtype}", f"{format_flops(rate * constants.matmul_share)}/s at best")
    rows: dict[str, str] = {
        "memory": f"{format_bytes(device.memory_bytes)} a rank",
        "memory bandwidth": f"{format_bytes(device.memory_bandwidth * constants.memory_share)}/s",
        "an op on one number": format_seconds(constants.kernel_s),
        "ranks of this host": _told(cluster.host.latency_s, cluster.host.bandwidth),
        "ranks of other hosts": _told(cluster.between.latency_s, cluster.between.bandwidth),
        "a step of nothing": format_seconds(constants.step_s) if constants.step_s else "hidden",
        "a process that holds nothing": format_bytes(constants.reserve_bytes),
        "start-up": format_seconds(notes["start_s"]),
    }
    for what, value in rows.items():
        table.add_row(what, value)
    console.print(table)
    for what, residuals in notes["residuals"].items():
        console.print(f"residuals of {what}: {_residuals(residuals)}", highlight=False, soft_wrap=True)
    if notes["notice"]:
        console.print(f"[yellow]notice[/yellow]: {notes['notice']}", highlight=False, soft_wrap=True)


def _told(latency_s: float, bandwidth: float) -> str:
    return f"{format_seconds(latency_s)} and {format_bytes(bandwidth)}/s"


def _residuals(residuals: Any) -> str:
    return "  ".join(f"{size}: {100 * error:+.0f} %" for size, error in residuals.items()) or "none"
