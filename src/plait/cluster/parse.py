"""What people write for a cluster: `8xA100`, `64x8xH100`, `A100`, a YAML file, or `this` for the measured machine.

In: text. Out: a `Cluster`, or a `ClusterError` that says how to write one.
"""

import re
from pathlib import Path

from plait.cluster.cluster import Cluster
from plait.cluster.files import read_cluster
from plait.cluster.presets import preset
from plait.errors import ClusterError

THIS = "this"
"""The machine that plait runs on, as `plait measure` found it."""
_HOW = "write it like 8xA100 (one host), 64x8xH100 (64 hosts of 8), a YAML file, or `this` after `plait measure`."


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` names."""
    if text == THIS:
        path = measured_path()
        if not path.exists():
            raise ClusterError("this machine has not been measured.", fix="run `plait measure` once.")
        return read_cluster(path)
    if text.endswith((".yaml", ".yml")):
        return read_cluster(Path(text))
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w-]*)", text.strip())
    if match is None:
        raise ClusterError(f"{text!r} is not a cluster.", fix=_HOW)
    first, second, name = match.groups()
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


def measured_path() -> Path:
    """Where `plait measure` leaves what it found."""
    return Path.home() / ".cache" / "plait" / "this.yaml"
