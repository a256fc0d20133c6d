"""Clusters that people name: a device by its data sheet, or a cloud's host by the cloud's own name for it.

In: a name. Out: a `Preset`, from which a `Cluster` of any number of hosts is made. The numbers are in `devices.py` and
`instances.py`.
"""

import re
from collections.abc import Mapping

from plait.cluster.devices import DEVICES, Preset
from plait.cluster.instances import INSTANCES
from plait.errors import ClusterError

_ALIASES = {
    "A100": "A100-80", "V100-32": "V100", "H100-80": "H100", "H100-SXM": "H100", "MI300": "MI300X",
    "RTX6000": "RTX6000-Ada", "A6000": "RTX-A6000", "GH200-96": "GH200", "ND96isr": "ND96isr_H100_v5",
    "ND96amsr": "ND96amsr_A100_v4",
    "ND96asr": "ND96asr_v4",
}  # fmt: skip


def preset(name: str) -> Preset:
    """The preset of a device, whatever its case and however it is joined: `RTX 4090`, `rtx-4090`, `RTX4090`."""
    found = _named(DEVICES, name)
    if found is None:
        raise ClusterError(
            f"there is no device {name!r}.",
            fix=f"use one of {', '.join(DEVICES)}, or describe the cluster in a YAML file.",
        )
    return found


def instance(name: str) -> Preset | None:
    """The host that a cloud rents under this name (`p4d.24xlarge`), or None."""
    return _named(INSTANCES, name)


def preset_called(device: str) -> Preset | None:
    """The preset of what a driver calls so: `NVIDIA A100-SXM4-40GB`, `NVIDIA GeForce RTX 4090`; None: not known."""

    def says(part: str) -> bool:
        joined = re.sub(r"(?<=[A-Za-z])(?=\d)", r"[\\s-]*", part)
        return (
            re.search(rf"\b{part}GB" if part.isdigit() else rf"\b{joined}\b", device, re.IGNORECASE)
            is not None
        )

    known = [key for key in DEVICES if all(says(part) for part in key.split("-"))]
    return DEVICES[max(known, key=len)] if known else None


def _named(table: Mapping[str, Preset], name: str) -> Preset | None:
    known = {_plain(key): key for key in table}
    known |= {_plain(alias): key for alias, key in _ALIASES.items() if key in table}
    key = known.get(_plain(name))
    return None if key is None else table[key]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).upper()
