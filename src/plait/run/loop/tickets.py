"""Which share of which step a worker takes next, where nobody waits for anybody.

In: a counter that all workers share. Out: (step, share) one after the other, each given out once: ticket n is share
n % shares of step n // shares, of the same global order of samples as under any other plan. A slow worker takes fewer;
of a dead one, only the tickets that it held are lost. A run that is to stop ends with a whole step, and whoever has
taken a ticket uses it: what was done then has no gaps.
"""

import itertools
from collections.abc import Callable, Iterator

from plait.run.start.launch import Seat

_NEXT, _END = "tickets/next", "tickets/end"
"""Keys of the run's store."""
Count = Callable[[], int]
"""0, 1, 2, ... over all who call it."""


def tickets(
    count: Count, shares: int, start_step: int, end: Callable[[], int | None] = lambda: None
) -> Iterator[tuple[int, int]]:
    """(step, share) in the order in which they are given out, below what `end` says once it says something.

    It is asked after a ticket was taken: so one that was taken before somebody wanted the run to end is below it.
    """
    while True:
        number = count()
        last = end()
        if last is not None and number >= last:
            return
        step, share = divmod(number, shares)
        yield start_step + step, share


def shared_end(seat: Seat, shares: int) -> Callable[[], int | None]:
    """The first ticket that is not used, once the run is to stop: the same for all workers, and the first of a step.

    Whoever asks first sets it, above all tickets that have been taken by then.
    """

    def end() -> int | None:
        if not seat.board.stop_requested():
            return None
        if seat.ranks == 1:
            return 0
        if seat.store.reach is None:
            return seat.board.tickets.end(shares)
        taken = seat.store.add(_NEXT, 0)
        return int(seat.store.compare_set(_END, b"", str(-(-taken // shares) * shares)))

    return end


def shared_count(seat: Seat) -> Count:
    """A counter for all processes of the run: on the board of a host, or in the store that several hosts reach."""
    if seat.ranks == 1:
        return itertools.count().__next__
    return seat.board.tickets.take if seat.store.reach is None else lambda: seat.store.add(_NEXT, 1) - 1
