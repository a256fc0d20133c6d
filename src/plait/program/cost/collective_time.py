"""How long communication takes among the ranks of a group.

In: what is communicated, how many bytes, what the group crosses (`Reach`), the device. Out: seconds from the last
arrival to the end. Algorithms are those of the common libraries: rings; trees and switches that add up for sums, where
they are quicker. Every step of a ring waits for the slowest of its hops, so one host boundary slows all steps.
docs/cost-model.md has the equations.
"""

from collections.abc import Callable
from math import ceil, log2

from plait.cluster.cluster import Device, Link, Reach

CollectiveSeconds = Callable[[str, float, Reach, Device], float]
"""(kind, bytes of the whole tensor, reach, device) -> seconds: `collective_seconds`, or a measured table."""
PIECES = ("all_gather", "reduce_scatter")
"""Collectives in which one side holds pieces: half of an all-reduce each."""


def collective_seconds(kind: str, num_bytes: float, reach: Reach, device: Device) -> float:
    """Time of an `all_reduce`, `all_gather` or `reduce_scatter` of `num_bytes`, the whole tensor's."""
    if reach.size <= 1 or num_bytes <= 0:
        return 0.0
    bandwidth, hop_s = bus_bandwidth(reach, device), slowest_hop(reach)
    start_s = device.calibration.kernel_s
    part = (reach.size - 1) / reach.size
    ring_s = start_s + (reach.size - 1) * hop_s + part * num_bytes / bandwidth
    if kind in PIECES:
        return ring_s
    twice_s = 2 * ring_s - start_s
    levels = 2 * ceil(log2(reach.hosts)) * reach.outer.latency_s
    tree_s = start_s + levels + 2 * (reach.per_host - 1) * reach.inner.latency_s + 2 * num_bytes / bandwidth
    best = min(twice_s, tree_s)
    if reach.inner.in_network and reach.hosts == 1:
        best = min(best, start_s + 2 * reach.inner.latency_s + num_bytes * (1 + 1 / reach.size) / bandwidth)
    return best


def message_seconds(num_bytes: float, link: Link, device: Device) -> float:
    """Time of one message between two devices."""
    return link.latency_s + num_bytes / (link.bandwidth * device.calibration.link_share)


def bus_bandwidth(reach: Reach, device: Device) -> float:
    """Bytes per second that pass every point of a ring.

    Rings of a group leave a host through the adapters of all its members there; a shared wire is divided among the
    groups that use it at once.
    """
    share = device.calibration.link_share
    inner = reach.inner.bandwidth * share
    if reach.inner.shared:
        inner /= max(1, reach.per_host * reach.at_once - 1)
    if reach.hosts == 1:
        return inner
    outer = reach.outer.bandwidth * share
    outer = outer / reach.at_once if reach.outer.shared else outer * reach.per_host
    return min(inner, outer) if reach.per_host > 1 else outer


def slowest_hop(reach: Reach) -> float:
    """Latency of a ring's slowest hop."""
    return reach.outer.latency_s if reach.hosts > 1 else reach.inner.latency_s
