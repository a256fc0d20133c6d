"""Clusters as YAML files.

In: a path. Out: a `Cluster`, or a `ClusterError` that names every problem; and the way back. What a file does not say
comes from the preset that its device names:

    device: A100-80            # or a mapping: {preset: A100-80, memory: 70GiB}
    hosts: 4
    devices_per_host: 8
    price_per_hour: 2.5        # of one device
    between: {latency_s: 7.0e-6, bandwidth: 12.5e+9}
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from plait.cluster.calibration import Calibration
from plait.cluster.cluster import Cluster, Device, Link
from plait.cluster.devices import Preset
from plait.cluster.presets import preset
from plait.errors import ClusterError
from plait.files.document import Format, read_yaml
from plait.files.shape import given_in, partial_of, shaped
from plait.files.write import write_named
from plait.units import parse_bytes

_LINKS = ("pair", "host", "between")
_Link = partial_of(Link)
_Calibration = partial_of(Calibration)
_FORMAT = Format(
    noun="a cluster",
    error=ClusterError,
    fix="see `plait measure` for a file, or write it like `device: A100-80`.",
)


class _Device(msgspec.Struct, forbid_unknown_fields=True):
    preset: str | None = None
    name: str | None = None
    memory: int | str | None = None
    peak_flops: dict[str, float] | None = None
    memory_bandwidth: float | None = None
    host_bandwidth: float | None = None
    processor_bandwidth: float | None = None
    duplex: float | None = None
    calibration: _Calibration | None = None  # type: ignore[valid-type]
    timed: dict[str, float] | None = None


class _Cluster(msgspec.Struct, forbid_unknown_fields=True):
    device: str | _Device
    name: str | None = None
    hosts: int = 1
    devices_per_host: int | None = None
    price_per_hour: float | None = None
    emulated: bool = False
    processors: int | None = None
    pair: _Link | None = None  # type: ignore[valid-type]
    host: _Link | None = None  # type: ignore[valid-type]
    between: _Link | None = None  # type: ignore[valid-type]
    measured: dict[str, Any] | None = None


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes; its section `measured` is for people."""
    document = read_yaml(path, _FORMAT)
    given = shaped(document, _Cluster, _FORMAT)
    try:
        return _cluster(given, path.stem)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error.what}", fix=error.fix) from error


def _cluster(given: _Cluster, name: str) -> Cluster:
    device, base = _device(given.device)
    per_host = base.devices_per_host if base else 1
    host = _link("host", given.host, base.host if base else None)
    return Cluster(
        name=given.name or name,
        device=device,
        hosts=given.hosts,
        devices_per_host=per_host if given.devices_per_host is None else given.devices_per_host,
        pair=_link("pair", given.pair, (base.pair if base else None) or host),
        host=host,
        between=_link("between", given.between, base.between if base else None),
        price_per_hour=given.price_per_hour,
        emulated=given.emulated,
        processors=given.processors,
    )


def write_cluster(cluster: Cluster, path: Path, measured: Mapping[str, Any] | None = None) -> None:
    """Write a cluster, and beside it what a measurement wants people to know."""
    device = cluster.device
    content: dict[str, Any] = {
        "name": cluster.name,
        "hosts": cluster.hosts,
        "devices_per_host": cluster.devices_per_host,
        "price_per_hour": cluster.price_per_hour,
        "emulated": cluster.emulated,
        "processors": cluster.processors,
        **{key: asdict(getattr(cluster, key)) for key in _LINKS},
        "measured": dict(measured or {}),
        "device": {
            "name": device.name,
            "memory": device.memory_bytes,
            "peak_flops": dict(device.peak_flops),
            "memory_bandwidth": device.memory_bandwidth,
            "host_bandwidth": device.host_bandwidth,
            "processor_bandwidth": device.processor_bandwidth,
            "duplex": device.duplex,
            "calibration": asdict(device.calibration),
            "timed": dict(device.timed),
        },
    }
    write_named(path, yaml.safe_dump(content, sort_keys=False, width=200))


def read_measured(path: Path) -> dict[str, Any]:
    """The section `measured` of a file."""
    return shaped(read_yaml(path, _FORMAT), _Cluster, _FORMAT).measured or {}


def _device(given: str | _Device) -> tuple[Device, Preset | None]:
    if isinstance(given, str):
        base = preset(given)
        return base.device, base
    base_of = preset(given.preset) if given.preset is not None else None
    changes: dict[str, Any] = {}
    if given.memory is not None:
        changes["memory_bytes"] = _memory(given.memory)
    for key in ("peak_flops", "timed", "memory_bandwidth", "host_bandwidth", "processor_bandwidth", "duplex"):
        if getattr(given, key) is not None:
            changes[key] = getattr(given, key)
    fitted: dict[str, Any] = {} if given.calibration is None else given_in(given.calibration)
    changes["calibration"] = replace(base_of.device.calibration if base_of else Calibration(), **fitted)
    changes["name"] = given.name or (base_of.device.name if base_of else "device")
    if base_of is not None:
        return replace(base_of.device, **changes), base_of
    missing = [key for key in ("memory_bytes", "peak_flops", "memory_bandwidth") if key not in changes]
    if missing:
        told = ", ".join(missing).replace("memory_bytes", "memory")
        raise ClusterError(f"device has no {told}.", fix="give them, or name a preset: `preset: A100-80`.")
    return Device(**changes), None


def _link(key: str, given: msgspec.Struct | None, start: Link | None) -> Link:
    if given is None:
        if start is None:
            raise ClusterError(f"no link `{key}` is given.", fix=f"add `{key}: {{latency_s:, bandwidth:}}`.")
        return start
    changes = given_in(given)
    if start is not None:
        return replace(start, **changes)
    missing = [name for name in ("latency_s", "bandwidth") if name not in changes]
    if missing:
        raise ClusterError(f"{key} has no {' and no '.join(missing)}.", fix="give both.")
    return Link(**changes)


def _memory(value: int | str) -> int:
    try:
        return value if isinstance(value, int) else parse_bytes(value)
    except ValueError as error:
        raise ClusterError(f"device.memory: {error}.", fix="write it like 80GiB.") from error
