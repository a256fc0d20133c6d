"""A prediction, and a measured machine, for people."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.run.measure.machine import Measured
from plait.run.measure.predict import Predicted
from plait.units import format_bytes, format_flops, format_seconds


def print_prediction(found: Predicted, console: Console) -> None:
    """A prediction for people."""
    p = found.prediction
    mesh = ", ".join(f"{name}={size}" for name, size in p.plan.mesh.axes)
    table = Table("what", "value", title=f"{p.plan.name} ({mesh}) on {p.cluster.title}", title_justify="left")
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
        console.print(Text("fits", style="green"))
    else:
        console.print(Text.assemble(("does not fit", "red"), f": {p.reason}"))


def print_measured(measured: Measured, console: Console) -> None:
    """What was found, for people."""
    cluster, notes = measured.cluster, measured.notes
    device, constants = cluster.device, cluster.device.calibration
    table = Table(
        "what",
        "value",
        title=f"{_hosts(cluster.hosts)}{cluster.devices_per_host} x {device.name}",
        title_justify="left",
    )
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
        console.print(Text.assemble(("notice", "yellow"), f": {notes['notice']}"), soft_wrap=True)


def _hosts(count: int) -> str:
    return f"{count} hosts of " if count > 1 else ""


def _told(latency_s: float, bandwidth: float) -> str:
    return f"{format_seconds(latency_s)} and {format_bytes(bandwidth)}/s"


def _residuals(residuals: Any) -> str:
    return "  ".join(f"{size}: {100 * error:+.0f} %" for size, error in residuals.items()) or "none"
