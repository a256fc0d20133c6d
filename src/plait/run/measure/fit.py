"""Fit the constants of a device and of its links to measured times.

In: (size, seconds) pairs. Out: constants, and how far each pair is from what they predict. Never measures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.cluster.calibration import Calibration
from plait.cluster.cluster import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Constants and what they leave unexplained."""

    start_s: float
    """Seconds that do not depend on the size."""
    per_unit_s: float
    """Seconds for each unit of the size."""
    residuals: Mapping[float, float]
    """By size: (predicted - measured) / measured."""


def fit_line(points: Sequence[tuple[float, float]]) -> Fit:
    """`seconds = start + size * per_unit`, with equal weight for every size's relative error."""
    sizes = np.array([size for size, _ in points], dtype=float)
    seconds = np.array([time for _, time in points], dtype=float)
    weights = 1.0 / seconds
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
    start, slope = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    if start < 0:  # times grow faster than sizes: no constant part can be seen
        start, slope = 0.0, float(np.mean(weights * sizes) / np.mean((weights * sizes) ** 2))
    if slope <= 0:
        start, slope = float(np.min(seconds)), float(np.max(seconds) / np.max(sizes))
    return Fit(
        start_s=float(start),
        per_unit_s=float(slope),
        residuals={s: float((start + slope * s) / t - 1) for s, t in points},
    )


def fit_saturating(points: Sequence[tuple[float, float]]) -> tuple[float, float, dict[float, float]]:
    """(best rate, half size, residuals) of `rate = best * size / (size + half)`, from (size, rate)."""
    # 1 / rate = 1 / best + (half / best) / size is a line in 1 / size.
    line = fit_line([(1.0 / size, 1.0 / rate) for size, rate in points])
    best = 1.0 / line.start_s if line.start_s > 0 else max(rate for _, rate in points)
    half = line.per_unit_s * best
    return best, half, {s: float(best * s / (s + half) / r - 1) for s, r in points}


def socket_link(line: Fit, ranks: int, calibration: Calibration) -> Link:
    """The link with which the cost model gives these times of an all-reduce of ranks that have a host each."""
    exchanges = 1 if ranks == 2 else 2
    crossing = exchanges * (ranks - 1) / ranks if ranks > 2 else 1.0
    return Link(
        latency_s=max(0.0, line.start_s - calibration.kernel_s) / exchanges,
        bandwidth=crossing / line.per_unit_s / calibration.link_share,
        direct=True,
    )


def middle(function: Callable[[], float], times: int) -> tuple[float, list[float]]:
    """The median of several measurements, and all of them; the first is not counted."""
    function()
    found = [function() for _ in range(times)]
    return float(np.median(found)), found
