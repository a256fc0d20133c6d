"""How fast the processes of this machine reach each other.

In: numbers of ranks. Out: times by operation, algorithm and size, and which backend can do what.
"""

from collections.abc import Sequence

from plait.errors import UsageError
from plait.options import Listener
from plait.program.hops.algorithms import OPERATIONS
from plait.run.measure.links.link_times import SIZES, LinkReport, measure_links


def links(
    ranks: Sequence[int] = (2, 4),
    *,
    operations: Sequence[str] = OPERATIONS,
    sizes: Sequence[int] = SIZES,
    listener: Listener | None = None,
) -> LinkReport:
    """Time collectives between processes of this machine, by every algorithm, beside gloo; and try every backend."""
    if not ranks or min(ranks) < 2:
        raise UsageError(f"links are between ranks: {list(ranks)} has fewer than 2.", fix="give 2 or more.")
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        raise UsageError(f"{unknown[0]} is no collective.", fix=f"use some of {', '.join(OPERATIONS)}.")
    return measure_links(ranks, sizes, operations, listener if listener is not None else (lambda event: None))
