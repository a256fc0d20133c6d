"""How long communication takes among the ranks of a group.

In: what is communicated, how many bytes, what the group crosses (`Reach`), the device. Out: seconds from the last
arrival to the end. Algorithms are those of the common libraries: rings; trees and switches that add up for sums, where
they are quicker. Every step of a ring waits for the slowest of its hops, so one host boundary slows all steps.
docs/cost-model.md has the equations.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2
from typing import NamedTuple

from plait.cluster.cluster import Device, Link, Reach
from plait.cluster.devices import DEVICES


class Travel(NamedTuple):
    """How long communication takes: others that are under way at the same time may have the wire meanwhile, or not."""

    wire_s: float
    """For which it has the wire to itself."""
    latency_s: float = 0.0
    """Beside that."""
    work_s: float = 0.0
    """For which it keeps a rank's own processor busy."""
    pieces: int = 1
    """In which it is made, of which one is on the wire while processors have others."""

    @property
    def edge_s(self) -> float:
        """Work before the first byte is on the wire, and as long again after the last one: with half a piece each."""
        return self.work_s / (2 * self.pieces)

    @property
    def between_s(self) -> float:
        """Work while other pieces are on the wire."""
        return self.work_s - 2 * self.edge_s

    def shared_s(self, held_s: float) -> float:
        """For how long processors keep the next one waiting, where they compute for `held_s` of its work as well: it
        then has half of one."""
        return self.between_s + (held_s * (1 + 2 * self.edge_s / self.work_s) if self.work_s else 0.0)

    @property
    def total_s(self) -> float:
        """From its start to its end, where it is alone."""
        return max(self.wire_s, self.between_s) + self.latency_s + 2 * self.edge_s


CollectiveSeconds = Callable[[str, float, Reach, Device], float]
"""(kind, bytes of the whole tensor, reach, device) -> seconds: `collective_seconds`, or a measured table."""
PIECES = ("all_gather", "reduce_scatter")
"""Collectives in which one side holds pieces: half of an all-reduce each."""
ROOTED = ("broadcast", "reduce")
"""Collectives in which everything passes through the first rank: a message from or to each of the others, in turn."""
SMALL_BYTES = 1 << 15
"""Up to this size, over our own sockets, everybody adds up everything: one exchange instead of two."""
SLOW_BYTES_PER_S = 2.5e8
"""Below which our own sockets are slow: packing and unpacking takes a processor 0.6 ns a byte, of which a seventh is
saved."""
PACKED_SHARE = 0.855
"""Of the bytes of float32 numbers that a slow socket sends: of normally distributed ones, with no zeros among them."""

PIECE_BYTES = 1 << 22
"""Of a sum in two levels that are in memory, or on the wire, at once: what the first and the last one take is not
hidden, and every piece costs processors: sums of 24 MiB among 2 x 2 ranks took 33 ms of a rank's processor in pieces of
1 MiB, 19 of 2 MiB, 15 of 4 MiB (`docs/log.md`)."""


def collective_travel(
    kind: str, num_bytes: float, reach: Reach, device: Device, *, levels: bool = True, packs: bool = False
) -> Travel:
    """A collective's time in its parts: over our own sockets none waits until the one before has arrived.

    `levels`: ranks of a host may meet in its memory first; `packs`: of numbers that slow sockets send in fewer bytes.
    """
    if kind not in ROOTED and num_bytes > 0 and reach.hosts > 1 and reach.outer.direct:
        is_two_level = levels and is_two_level_cheaper(kind, num_bytes, reach)
        found = (_two_level if is_two_level else _direct)(kind, num_bytes, reach, device)
        return found._replace(wire_s=found.wire_s * PACKED_SHARE) if packs and is_slow(reach) else found
    return Travel(collective_seconds(kind, num_bytes, reach, device))


def collective_seconds(kind: str, num_bytes: float, reach: Reach, device: Device) -> float:
    """Time of a collective of `num_bytes`, the whole tensor's."""
    if reach.size <= 1 or num_bytes <= 0:
        return 0.0
    if kind in ROOTED:
        link = reach.outer if reach.hosts > 1 else reach.inner
        return device.calibration.kernel_s + (reach.size - 1) * message_seconds(num_bytes, link, device)
    if reach.hosts > 1 and reach.outer.direct:
        return collective_travel(kind, num_bytes, reach, device).total_s
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


def is_slow(reach: Reach) -> bool:
    """Whether a socket between hosts has so little of the wire that its ends pack numbers."""
    sockets = reach.per_host * reach.at_once if reach.outer.shared else 1
    return reach.outer.bandwidth / sockets < SLOW_BYTES_PER_S


def is_two_level_cheaper(kind: str, num_bytes: float, reach: Reach) -> bool:
    """Whether a collective is to be made within hosts first and then between them, not by everybody with everybody.

    By what processors usually have, whatever was measured: a run and its prediction decide alike, and so do two runs,
    since it is the order in which sums are made.
    """
    if reach.hosts < 2 or reach.per_host < 2 or kind not in ("all_reduce", *PIECES):
        return False
    usual = DEVICES["cpu"]
    between = replace(usual.between, shared=True, direct=True)
    reach = replace(reach, inner=usual.host, outer=between)
    flat = _direct(kind, num_bytes, reach, usual.device)
    return _two_level(kind, num_bytes, reach, usual.device).total_s < flat.total_s


def _direct(kind: str, num_bytes: float, reach: Reach, device: Device) -> Travel:
    """Everybody sends everybody else its piece at once; of a sum, then what it summed; of a small one, and between two,
    all at first."""
    others = reach.size - reach.per_host
    rounds, crossing = 1, num_bytes * others / reach.size
    if kind == "all_reduce":
        is_small = num_bytes <= SMALL_BYTES or reach.size == 2
        rounds, crossing = (1, num_bytes * others) if is_small else (2, 2 * crossing)
    if reach.outer.shared:
        crossing *= reach.per_host * reach.at_once
    return Travel(
        wire_s=crossing / (reach.outer.bandwidth * device.calibration.link_share),
        latency_s=device.calibration.kernel_s + rounds * reach.outer.latency_s,
        work_s=level_work_s(num_bytes, reach.outer),
        pieces=rounds
        * others,  # packed, sent and received one after the other, while the wire has another one
    )


def level_work_s(num_bytes: float, link: Link) -> float:
    """Processor time of a rank for one level of a collective between hosts, of a tensor of so many bytes."""
    return link.work_s + num_bytes * link.work_s_per_byte


def _two_level(kind: str, num_bytes: float, reach: Reach, device: Device) -> Travel:
    """Within hosts, between those at the same place in them with a part each, and within hosts again; of a sum, piece
    after piece, of which one is on the wire while others are in memory. Copies, sums and what is handed from thread to
    thread cost processors about the same on both levels, of the bytes that each has."""
    each = reach.per_host
    inner = replace(reach, size=each, hosts=1)
    outer = replace(reach, size=reach.hosts, per_host=1, at_once=reach.at_once * each)
    between = _direct(kind, num_bytes / each, outer, device)
    if kind == "all_reduce":
        within_s = 2 * collective_seconds("all_gather", min(num_bytes, PIECE_BYTES), inner, device)
    else:
        within_s = collective_seconds("all_gather", num_bytes, inner, device)
    return Travel(
        wire_s=between.wire_s,
        latency_s=between.latency_s + within_s,
        work_s=between.work_s + level_work_s(num_bytes, reach.outer),
        pieces=between.pieces * (num_pieces(num_bytes) if kind == "all_reduce" else 1),
    )


def num_pieces(num_bytes: float) -> int:
    """Of a sum in two levels: equal ones, of about `PIECE_BYTES`; a little more than one is no second one."""
    return max(1, round(num_bytes / PIECE_BYTES))


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
