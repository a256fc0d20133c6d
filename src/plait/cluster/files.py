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
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from plait.cluster.calibration import Calibration
from plait.cluster.cluster import Cluster, Device, Link
from plait.cluster.presets import Preset, preset
from plait.errors import ClusterError
from plait.files.write import write_whole
from plait.units import parse_bytes

_LINKS = ("pair", "host", "between")
_KEYS = ("name", "device", "hosts", "devices_per_host", "price_per_hour", *_LINKS, "measured")
_DEVICE_KEYS = (
    "preset",
    "name",
    "memory",
    "peak_flops",
    "memory_bandwidth",
    "calibration",
    "timed",
)


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes; its section `measured` is for people."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}.", fix="give another file.") from error
    except yaml.YAMLError as error:
        raise ClusterError(
            f"{path} is not YAML: {str(error).splitlines()[0]}.", fix="mend that line."
        ) from error
    try:
        return cluster_from(content, path.stem)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error.what}", fix=error.fix) from error


def cluster_from(content: Any, name: str) -> Cluster:
    """The cluster that a mapping describes."""
    given = _mapping(content, "the file", _KEYS)
    device, base = _device(given.get("device"))
    links = {key: _link(key, given.get(key), _of_preset(base, key)) for key in _LINKS if key != "pair"}
    pair = _link("pair", given.get("pair"), base.pair if base else None, fallback=links["host"])
    return Cluster(
        name=str(given.get("name", name)),
        device=device,
        hosts=_count(given.get("hosts", 1), "hosts"),
        devices_per_host=_count(
            given.get("devices_per_host", base.devices_per_host if base else 1), "devices_per_host"
        ),
        pair=pair,
        price_per_hour=_optional_number(given.get("price_per_hour"), "price_per_hour"),
        **links,
    )


def write_cluster(cluster: Cluster, path: Path, measured: Mapping[str, Any] | None = None) -> None:
    """Write a cluster, and beside it what a measurement wants people to know."""
    device = cluster.device
    content: dict[str, Any] = {
        "name": cluster.name,
        "hosts": cluster.hosts,
        "devices_per_host": cluster.devices_per_host,
        "price_per_hour": cluster.price_per_hour,
        **{key: asdict(getattr(cluster, key)) for key in _LINKS},
        "measured": dict(measured or {}),
        "device": {
            "name": device.name,
            "memory": device.memory_bytes,
            "peak_flops": dict(device.peak_flops),
            "memory_bandwidth": device.memory_bandwidth,
            "calibration": asdict(device.calibration),
            "timed": dict(device.timed),
        },
    }
    write_whole(path, yaml.safe_dump(content, sort_keys=False, width=200))


def read_measured(path: Path) -> dict[str, Any]:
    """The section `measured` of a file."""
    content = yaml.safe_load(path.read_text())
    return dict(content.get("measured") or {})


def _device(given: Any) -> tuple[Device, Preset | None]:
    if given is None:
        raise ClusterError("no device is named.", fix="add `device: A100-80`, or a mapping of its numbers.")
    if isinstance(given, str):
        base = preset(given)
        return base.device, base
    entries = _mapping(given, "device", _DEVICE_KEYS)
    base_of = preset(str(entries["preset"])) if "preset" in entries else None
    changes: dict[str, Any] = {}
    if "memory" in entries:
        changes["memory_bytes"] = _memory(entries["memory"])
    for key in ("peak_flops", "timed"):
        if key in entries:
            rates = _mapping(entries[key], f"device.{key}", None)
            changes[key] = {str(k): _number(v, f"device.{key}.{k}") for k, v in rates.items()}
    if "memory_bandwidth" in entries:
        changes["memory_bandwidth"] = _number(entries["memory_bandwidth"], "device.memory_bandwidth")
    start = base_of.device.calibration if base_of else Calibration()
    known = tuple(entry.name for entry in fields(Calibration))
    fitted = _mapping(entries.get("calibration") or {}, "device.calibration", known)
    changes["calibration"] = replace(
        start, **{k: _number(v, f"device.calibration.{k}") for k, v in fitted.items()}
    )
    changes["name"] = str(entries.get("name", base_of.device.name if base_of else "device"))
    if base_of is not None:
        return replace(base_of.device, **changes), base_of
    missing = [key for key in ("memory_bytes", "peak_flops", "memory_bandwidth") if key not in changes]
    if missing:
        told = ", ".join(missing).replace("memory_bytes", "memory")
        raise ClusterError(f"device has no {told}.", fix="give them, or name a preset: `preset: A100-80`.")
    return Device(**changes), None


def _of_preset(base: Preset | None, key: str) -> Link | None:
    return getattr(base, key) if base is not None else None


def _link(key: str, given: Any, base: Link | None, fallback: Link | None = None) -> Link:
    start = base or fallback
    if given is None:
        if start is None:
            raise ClusterError(f"no link `{key}` is given.", fix=f"add `{key}: {{latency_s:, bandwidth:}}`.")
        return start
    known = tuple(entry.name for entry in fields(Link))
    entries = _mapping(given, key, known)
    changes: dict[str, Any] = {
        name: _flag(value, f"{key}.{name}")
        if name in ("in_network", "shared", "background")
        else _number(value, f"{key}.{name}")
        for name, value in entries.items()
    }
    if start is not None:
        return replace(start, **changes)
    missing = [name for name in ("latency_s", "bandwidth") if name not in changes]
    if missing:
        raise ClusterError(f"{key} has no {' and no '.join(missing)}.", fix="give both.")
    return Link(**changes)


def _mapping(value: Any, what: str, known: tuple[str, ...] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ClusterError(f"{what} is {type(value).__name__}, not a mapping.", fix="write key: value lines.")
    unknown = [str(key) for key in value if known is not None and key not in known]
    if unknown:
        raise ClusterError(
            f"{what} has unknown keys: {', '.join(unknown)}.", fix=f"use {', '.join(known or ())}."
        )
    return value


def _number(value: Any, what: str) -> float:
    try:
        return float(value)  # YAML reads 1e9 as text
    except (TypeError, ValueError):
        raise ClusterError(f"{what}={value!r} is not a number.", fix="give a number, like 2.5e+9.") from None


def _optional_number(value: Any, what: str) -> float | None:
    return None if value is None else _number(value, what)


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"{what}={value!r} is not a count.", fix="give a whole number, 1 or more.")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ClusterError(f"{what}={value!r} is neither true nor false.", fix="give true or false.")
    return value


def _memory(value: Any) -> int:
    try:
        return value if isinstance(value, int) else parse_bytes(str(value))
    except ValueError as error:
        raise ClusterError(f"device.memory: {error}.", fix="write it like 80GiB.") from error
