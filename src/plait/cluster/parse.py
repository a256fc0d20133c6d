"""What people write for a cluster: `8xA100`, `64x8xH100`, `A100`, `4xp4d.24xlarge`, a YAML file, or `this`.

In: text. Out: a `Cluster`, or a `ClusterError` that says how to write one.
"""

import re
from pathlib import Path

from plait.cluster.cluster import Cluster
from plait.cluster.devices import Preset
from plait.cluster.files import read_cluster
from plait.cluster.presets import instance, preset
from plait.errors import ClusterError

THIS = "this"
"""The machine that plait runs on, as `plait measure` found it."""
HOSTS_FILE = Path("hosts.yaml")
"""Where `plait measure` leaves the hosts of an engine, in the folder in which it was started."""
_HOW = (
    "write it like 8xA100 (one host), 64x8xH100 (64 hosts of 8), 4xp4d.24xlarge (4 hosts of a cloud), a YAML file, or "
    "`this` after `plait measure`."
)


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` names."""
    if text == THIS:
        path = measured_path()
        if not path.exists():
            raise ClusterError("this machine has not been measured.", fix="run `plait measure` once.")
        return read_cluster(path)
    if text.endswith((".yaml", ".yml")):
        return read_cluster(Path(text))
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w. -]*)", text.strip())
    if match is None:
        raise ClusterError(f"{text!r} is not a cluster.", fix=_HOW)
    first, second, name = match.groups()
    rented = instance(name)
    if rented is not None:
        return _hosts_of(text, rented, int(first or 1), None if second is None else int(second))
    found = preset(name)
    if first is None:
        return found.cluster(text, 1, 1)
    if second is not None:
        return found.cluster(text, int(first), int(second))
    count, per_host = int(first), found.devices_per_host
    if count <= per_host:
        return found.cluster(text, 1, count)
    if count % per_host:
        raise ClusterError(
            f"{text}: {count} devices do not fill hosts of {per_host}.",
            fix=f"write HOSTSxDEVICESx{name}, for example {-(-count // per_host)}x{per_host}x{name}.",
        )
    return found.cluster(text, count // per_host, per_host)


def _hosts_of(text: str, rented: Preset, hosts: int, used: int | None) -> Cluster:
    """Whole hosts of a cloud, or so many devices of each."""
    if used is not None and used > rented.devices_per_host:
        raise ClusterError(
            f"{text}: such a host has {rented.devices_per_host} devices, not {used}.",
            fix=f"use up to {rented.devices_per_host}, and more hosts.",
        )
    return rented.cluster(text, hosts, rented.devices_per_host if used is None else used)


def measured_path() -> Path:
    """Where `plait measure` leaves what it found."""
    return Path.home() / ".cache" / "plait" / "this.yaml"
