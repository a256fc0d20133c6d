"""The measured collectives of one published cluster.

In: the bus bandwidths that its owners measured by the number of nodes. Out: a `CollectiveSeconds`. The network of the
Hugging Face sweep (H100 hosts, 400 GB/s of EFA each) slows down with every rank that a ring has: each of its steps takes
some 40 microseconds between hosts, so bandwidth that was measured with 256 MB says less about smaller messages.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import log2
from types import MappingProxyType

from plait.cluster.cluster import Device, Reach
from plait.program.timing.collective_time import bus_bandwidth, collective_seconds

_RANKS = (8, 16, 32, 64, 128, 256, 512)
_GB_PER_S: Mapping[str, Sequence[float]] = MappingProxyType(
    {
        "all_reduce": (436.0, 361.7, 160.1, 99.6, 84.7, 64.9, 32.9),
        "all_gather": (249.8, 184.6, 119.0, 69.0, 55.0, 28.0, 11.0),
        "reduce_scatter": (249.7, 181.6, 115.8, 68.6, 54.5, 27.9, 11.1),
    }
)
"""Ultra-Scale Playbook, pp_comm_bandwidth.html: bus bandwidth of 256 MB messages on 1, 2, 4 ... 64 nodes of 8."""
STEP_S = 45e-6
"""Of one step of a ring between hosts: what remains of the measured times when their bandwidth is taken out."""
_HOST = 8


def efa_seconds(kind: str, num_bytes: float, reach: Reach, device: Device) -> float:
    """Like `collective_seconds`, between hosts by the table."""
    if reach.hosts == 1 or reach.size == 1:
        return collective_seconds(kind, num_bytes, reach, device)
    rates = _GB_PER_S.get(kind)
    if rates is None:
        return collective_seconds(kind, num_bytes, reach, device)
    rate = min(_between(rates, reach.size) * 1e9 * reach.per_host / _HOST, bus_bandwidth(reach, device))
    times = 2 if kind == "all_reduce" else 1
    steps = STEP_S * (2 * log2(reach.hosts) if kind == "all_reduce" else reach.size - 1)
    return steps + times * num_bytes * (reach.size - 1) / reach.size / rate


def _between(rates: Sequence[float], ranks: int) -> float:
    """Interpolated in the logarithm of the number of ranks."""
    at = min(max(bisect_left(_RANKS, ranks), 1), len(_RANKS) - 1)
    low, high = _RANKS[at - 1], _RANKS[at]
    share = min(max((log2(ranks) - log2(low)) / (log2(high) - log2(low)), 0.0), 1.0)
    return rates[at - 1] ** (1 - share) * rates[at] ** share
