"""This machine as a cluster: measured, kept, and found again.

In: which devices. Out: a cluster, in a file where `--cluster this` looks for it.
"""

from collections.abc import Callable
from pathlib import Path

from plait.cluster.cluster import Cluster
from plait.cluster.files import read_cluster, read_measured, write_cluster
from plait.cluster.parse import measured_path
from plait.options import Listener
from plait.run.measure.machine import Measured, measure_machine
from plait.run.setup.device import check_device


def measure(
    device: str = "cpu", *, out: str | Path | None = None, listener: Listener | None = None
) -> Measured:
    """Measure this machine, about ten seconds, and write it to `out`; by default to where `cluster="this"` looks."""
    check_device(device)
    measured = measure_machine(device, listener if listener is not None else (lambda event: None))
    write_cluster(measured.cluster, Path(out) if out is not None else measured_path(), measured.notes)
    return measured


def this_machine(device: str, tell: Callable[[str], None]) -> Cluster:
    """This machine, measured now if it was not before."""
    path = measured_path()
    if path.exists():
        known = read_cluster(path)
        if known.device.name.startswith("cpu") == (device == "cpu"):
            return known
    return measure(device, listener=lambda event: tell(event.get("stage", "measuring"))).cluster


def remember(cluster: Cluster) -> None:
    """Keep what was timed for the next prediction."""
    path = measured_path()
    write_cluster(cluster, path, read_measured(path))
