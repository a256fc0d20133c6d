"""Which share of which step a worker takes next, where nobody waits for anybody.

In: a counter that all workers share. Out: (step, share) one after the other, each given out once: ticket n is share
n % shares of step n // shares, of the same global order of samples as under any other plan. A slow worker takes fewer;
of a dead one, only the tickets that it held are lost.
"""

import itertools
from collections.abc import Callable, Iterator

from plait.run.start.launch import Seat

Count = Callable[[], int]
"""0, 1, 2, ... over all who call it."""


def tickets(count: Count, shares: int, start_step: int) -> Iterator[tuple[int, int]]:
    """(step, share) in the order in which they are given out; endless."""
    while True:
        step, share = divmod(count(), shares)
        yield start_step + step, share


def shared_count(seat: Seat) -> Count:
    """A counter that the parent's store keeps for all processes; it answers one of them at a time."""
    if seat.ranks == 1:
        return itertools.count().__next__
    return lambda: seat.store.add("tickets/next", 1) - 1
