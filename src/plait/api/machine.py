"""This machine as a cluster, or the hosts that an engine started: measured, kept, and found again.

In: which devices. Out: a cluster, in a file where `--cluster this` looks for it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.cluster.cluster import Cluster
from plait.cluster.files import read_cluster, read_measured, write_cluster
from plait.cluster.parse import HOSTS_FILE, measured_path
from plait.options import Listener
from plait.run.measure.hosts import heard, led, measure_hosts, told
from plait.run.measure.machine import Measured, measure_machine
from plait.run.setup.device import check_device
from plait.run.start.party import place_here
from plait.run.start.tasks.first import First


def measure(
    device: str = "cpu", *, out: str | Path | None = None, listener: Listener | None = None
) -> Measured:
    """Measure this machine, about ten seconds, and write it to `out`; by default to where `cluster="this"` looks.

    Of tasks that an engine started, the first measures its machine, and then all of them the links between hosts.
    """
    check_device(device)
    place = place_here()
    hear = listener if listener is not None else (lambda event: None)
    if place is None:
        measured = measure_machine(device, hear)
        write_cluster(measured.cluster, Path(out) if out is not None else measured_path(), measured.notes)
        return measured

    def lead(party: First) -> dict[str, Any]:
        found = measure_machine(device, hear)
        hear({"stage": "measuring the links between hosts"})
        hosts = measure_hosts(party, found.cluster)
        residuals = found.notes["residuals"] | {"between hosts": dict(hosts.residuals)}
        notes = {**found.notes, "residuals": residuals}
        write_cluster(hosts.cluster, Path(out or HOSTS_FILE), notes)
        return {"cluster": told(hosts.cluster), "notes": notes}

    said = led(place, "measure", lead)
    return Measured(cluster=heard(said["cluster"]), notes=said["notes"])


def this_machine(device: str, tell: Callable[[str], None]) -> Cluster:
    """This machine, measured now if it was not before."""
    path = measured_path()
    if path.exists():
        known = read_cluster(path)
        if known.device.name.startswith("cpu") == (device == "cpu"):
            return known
    found = measure_machine(device, lambda event: tell(event.get("stage", "measuring")))
    write_cluster(found.cluster, path, found.notes)
    return found.cluster


def these_hosts(party: First, device: str, tell: Callable[[str], None]) -> Cluster:
    """The hosts that an engine started, this one measured now if it was not before, the links between them now."""
    machine = this_machine(device, tell)
    place = party.place
    if place.is_rank or place.local_tasks > 1:  # a task is one rank, and starts no more
        machine = replace(machine, devices_per_host=place.local_tasks)
    tell("measuring the links between hosts")
    return measure_hosts(party, machine).cluster


def cluster_here(device: str, tell: Callable[[str], None]) -> Cluster:
    """This machine; or, on all tasks that an engine started, their hosts."""
    place = place_here()
    if place is None:
        return this_machine(device, tell)
    said = led(place, "plan", lambda party: {"cluster": told(these_hosts(party, device, tell))})
    return heard(said["cluster"])


def remember(cluster: Cluster) -> None:
    """Keep what was timed for the next prediction."""
    path = measured_path()
    known = read_cluster(path)
    write_cluster(replace(known, device=cluster.device), path, read_measured(path))
