"""Bytes, FLOPs, counts and seconds: parsed from what people write, printed for people to read."""

import re

_BYTES = {
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(text: str) -> int:
    """`70GiB`, `512 MB`, `1.5g` or `4096` as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory; write it like 70GiB or 512MB")
    number, unit = match.groups()
    key = unit.lower().removesuffix("b") or "b"
    if key not in _BYTES:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}; use kB, MB, GB, KiB, MiB or GiB")
    try:
        return int(float(number) * _BYTES[key])
    except (ValueError, OverflowError):
        raise ValueError(f"{text[:40]!r} is not a number of bytes") from None


def parse_rate(text: str) -> float:
    """`1Gbit`, `100 Mbit` or `10MB`, each a second, as bytes per second."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kMGT]?)(bit|B)\s*", text)
    rate = 0.0
    if match is not None and match[1].count(".") < 2 and match[1] != ".":
        rate = float(match[1]) * _BYTES[match[2].lower() or "b"] / (8 if match[3] == "bit" else 1)
    if not rate > 0:
        raise ValueError(f"{text!r} is no bandwidth; write it like 1Gbit or 100MB")
    return rate


def parse_seconds(text: str) -> float:
    """`1ms`, `50us` or `0.2s` as seconds."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(s|ms|us)\s*", text)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"{text!r} is no time; write it like 1ms or 50us")
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match[2]]


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit: `1.5 GiB`."""
    return _scaled(num_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_flops(flops: float) -> str:
    """Floating-point operations with a decimal unit: `3.1 TFLOP`."""
    return _scaled(flops, 1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def format_count(count: float) -> str:
    """A plain number with a short suffix: `124.4M`."""
    return _scaled(count, 1000.0, ("", "k", "M", "B", "T")).replace(" ", "")


def format_seconds(seconds: float) -> str:
    """A duration from nanoseconds to hours: `12.3 ms`, `4 min 10 s`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= base and index < len(units) - 1:
        value /= base
        index += 1
    digits = f"{value:.0f}" if index == 0 or abs(value) >= 100 else f"{value:.1f}"
    return f"{digits} {units[index]}"
