"""Groups of options: an invalid one cannot be built."""

from collections.abc import Callable

import pytest

from plait.errors import UsageError
from plait.options import Emulation, Limits, Saving, Search

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no steps": (lambda: Saving(checkpoint_every=0), "checkpoint_every=0 is not a number of steps"),
    "no patience": (lambda: Limits(hang_s=0), "hang_s=0 is not a time"),
    "no devices": (lambda: Search(ranks=0), "--ranks 0"),
    "nothing to show": (lambda: Search(top=0), "leaves nothing to show"),
    "no time": (lambda: Search(seconds=0), "leaves nothing to show"),
    "no network": (
        lambda: Emulation.parse("bandwidth=1Gbit,hosts=2x2"),
        "does not say bandwidth, latency and",
    ),
    "no hosts": (lambda: Emulation.parse("bandwidth=1Gbit,latency=1ms,hosts=2"), "does not say"),
    "no bandwidth": (
        lambda: Emulation.parse("bandwidth=fast,latency=1ms,hosts=2x2"),
        "'fast' is no bandwidth",
    ),
    "no latency": (lambda: Emulation.parse("bandwidth=1Gbit,latency=1,hosts=2x2"), "'1' is no time"),
    "paid for using it": (lambda: Search(price=-1.0), "is negative"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_cannot_be_built(name: str) -> None:
    make, told = WRONG[name]
    with pytest.raises(UsageError, match=told):
        make()


def test_a_network_is_read() -> None:
    found = Emulation.parse("bandwidth=1Gbit, latency=1.5ms, hosts=2x3")
    assert (found.bandwidth, found.latency_s, found.ranks) == (125e6, 1.5e-3, 6)
    assert [found.host_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
