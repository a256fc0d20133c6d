"""Whether other programs are using this machine while it is measured.

In: nothing, or times of one thing that was done again and again. Out: how many cores others use, how much times spread,
and a sentence for people where either says that the measurement cannot be trusted.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

_SPREAD = 0.2
"""Share of the median between the quartiles at which times say nothing."""
_BUSY = 0.25
"""Cores of others that are noticed."""


def foreign_cores(seconds: float = 0.3) -> float:
    """Cores that other processes keep busy just now; the load average where the system does not say."""
    before = _busy_ticks()
    own_before = sum(os.times()[:4])
    if before is None:
        return float(os.getloadavg()[0])
    time.sleep(seconds)
    after = _busy_ticks()
    assert after is not None
    ticks = os.sysconf("SC_CLK_TCK")
    return max(0.0, (after - before) / ticks - (sum(os.times()[:4]) - own_before)) / seconds


def spread(times: Sequence[float]) -> float:
    """The distance of the quartiles over the median."""
    if len(times) < 4:
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / median(times)


def complaint(foreign: float, spread_of_times: float) -> str | None:
    """What a person should know before trusting the numbers."""
    told = []
    if foreign > _BUSY:
        told.append(f"other programs keep {foreign:.1f} of {os.cpu_count()} cores busy")
    if spread_of_times > _SPREAD:
        told.append(f"the same work takes times that differ by {100 * spread_of_times:.0f} %")
    return f"{' and '.join(told)}: measure again when the machine is quiet." if told else None


def _busy_ticks() -> float | None:
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, soft, _steal = (float(value) for value in fields)
    return user + nice + system + irq + soft
