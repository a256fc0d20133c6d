"""Published measurements that need no model: collectives, and pipelines with profiled times.

In: a `Case`. Out: pairs (predicted, measured), or `UnclearError`.
"""

import re
from collections.abc import Mapping
from typing import Any

from plait.cluster.presets import preset
from plait.program.cost.collective_time import collective_seconds
from plait.program.simulate.schedule_clock import bubble_rate, durations, program_of_schedule
from plait.program.simulate.simulator import simulate
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import Costs
from plait.search.published.case import Case, number, whole
from plait.search.published.setup import UnclearError

_SCHEDULES: Mapping[str, str] = {
    "1F1B": "1f1b",
    "ZB-H1": "zero-bubble",
    "ZB-1p": "zero-bubble",
    "ZB-H2": "zero-bubble-2",
}
"""Published names of schedules that plait has; others were found by a search of their own."""


_MOST_ACTIONS = 2**16
"""Ranks times micro-batches of a schedule."""


def collective_rates(case: Case) -> list[tuple[float, float]]:
    """Bus bandwidth of all-reduces by size, in bytes per second."""
    match = re.search(r"(V100|A100|H100|H200|B200)", str(case.cluster.get("gpu", "")).upper())
    gpus = whole(case.cluster.get("gpus"))
    kib = case.measured.get("size_kib")
    sizes = case.measured.get("size_bytes") or [
        size * 1024 for size in (kib if isinstance(kib, list) else ()) if number(size)
    ]
    rates = case.measured.get("busbw_gbs")
    if match is None or gpus is None or not isinstance(sizes, list) or not isinstance(rates, list):
        raise UnclearError("no table of all-reduces by size on a known device and number of them")
    found = preset(match.group(1))
    per_host = min(gpus, found.devices_per_host)
    cluster = found.cluster("published", -(-gpus // per_host), per_host)
    reach = cluster.link_of(1, gpus)
    pairs = []
    for size, rate in zip(sizes, rates, strict=False):
        if number(size) and number(rate):
            seconds = collective_seconds("all_reduce", size, reach, cluster.device)
            pairs.append((2 * (gpus - 1) / gpus * size / seconds, rate * 1e9))
    if not pairs:
        raise UnclearError("the table of all-reduces is empty")
    return pairs


def pipeline_bubbles(case: Case) -> list[tuple[float, float]]:
    """Idle shares of schedules from profiled times."""
    times: Any = case.measured.get("profiled_ms")
    rates: Any = case.measured.get("bubble_rate")
    ranks, micro_batches = whole(case.plan.get("pipe")), whole(case.plan.get("micro_batches"))
    if not isinstance(times, Mapping) or not isinstance(rates, Mapping) or not ranks or not micro_batches:
        raise UnclearError(
            "no profiled times and bubble rates: a relative speed says nothing about a schedule alone"
        )
    parts = [number(times.get(name)) for name in ("TF", "TB", "TW")]
    if ranks * micro_batches > _MOST_ACTIONS:
        raise UnclearError(f"{ranks:,} ranks with {micro_batches:,} micro-batches are too many to simulate")
    if None in parts:
        raise UnclearError("the profiled times lack TF, TB or TW")
    forward, backward, weight = (part or 0.0 for part in parts)
    message = number(times.get("Tcomm")) or 0.0
    duration = durations(Costs(forward=forward, input=backward, weight=weight), message=message)
    pairs = []
    for published, name in _SCHEDULES.items():
        measured = number(rates.get(published))
        if measured is not None:
            program = program_of_schedule(name, SCHEDULES[name](ranks, 1, micro_batches))
            pairs.append((bubble_rate(simulate(program, duration)), measured))
    if not pairs:
        raise UnclearError("none of its schedules is known")
    return pairs
