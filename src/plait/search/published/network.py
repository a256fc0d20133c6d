"""The network of one published cluster: H100 hosts with 400 GB/s of EFA each (Hugging Face's sweep).

In: what its owners measured. Out: a `CollectiveSeconds`. Rings there are slow to start: every step between hosts takes
tens of microseconds, so the bandwidth that was measured with 256 MB falls with the number of ranks. Sums of whole hosts
are taken from the table; for the rest the table gives the time of a step and the bandwidth that remains.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, log2

from plait.cluster.cluster import Device, Reach
from plait.program.cost.collective_time import collective_seconds
from plait.search.published.case import Case

_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks of `_ALL_REDUCE`."""
_ALL_REDUCE = (436.0, 361.7, 160.1, 99.6, 84.7, 64.9, 32.9)
"""Ultra-Scale Playbook, pp_comm_bandwidth.html: bus GB/s of an all-reduce of 256 MB on 1, 2, 4 ... 64 hosts of 8."""
STEP_S = 45e-6
"""One step of a ring between hosts: all-gathers of 256 MB take 23 ms on 512 ranks, 9.1 on 256, 2.1 on 32."""
WHOLE_HOSTS = 42e9
"""Bytes per second and device where a group has all devices of its hosts: what remains of 184.6 GB/s on 2 hosts."""
PART_OF_HOSTS = 20e9
"""The same where it has some of them, and the groups of the others communicate too."""


def efa_seconds(kind: str, num_bytes: float, reach: Reach, device: Device) -> float:
    """Like `collective_seconds`, between hosts as that network does it."""
    if reach.hosts == 1 or reach.size == 1:
        return collective_seconds(kind, num_bytes, reach, device)
    part = (reach.size - 1) / reach.size
    rate = reach.per_host * (WHOLE_HOSTS if reach.at_once == 1 else PART_OF_HOSTS)
    if kind != "all_reduce":
        return STEP_S * (reach.size - 1) + part * num_bytes / rate
    if reach.at_once == 1:
        rate = min(rate, 1e9 * _interpolated(_ALL_REDUCE, reach.size))
    return STEP_S * 2 * ceil(log2(reach.hosts)) + 2 * part * num_bytes / rate


def _interpolated(rates: Sequence[float], ranks: int) -> float:
    """In the logarithm of the number of ranks."""
    at = min(max(bisect_left(_RANKS, ranks), 1), len(_RANKS) - 1)
    low, high = _RANKS[at - 1], _RANKS[at]
    share = min(max((log2(ranks) - log2(low)) / (log2(high) - log2(low)), 0.0), 1.0)
    return float(rates[at - 1] ** (1 - share) * rates[at] ** share)


CROWDED_HOSTS = 32
"""Up to so many hosts the network behaves as above."""
CROWDED_S = 0.3
"""Beyond, every micro-batch takes longer by this: all runs on 64 hosts do, from 0.1 to 2.7 s, whatever their plan."""


def crowded_s(hosts: int) -> float:
    """What a micro-batch waits on so many hosts of that cluster."""
    return CROWDED_S if hosts > CROWDED_HOSTS else 0.0


def is_efa(case: Case) -> bool:
    """Whether a case ran on that cluster: it says so, or it is of that sweep."""
    return "hf-collectives" in str(case.cluster.get("inter", "")) or "Ultra-Scale" in case.source
