"""Cut a row into ranges, one for each stage of a pipeline, by dynamic programming.

In: for every stage what each range of the row would cost it. Out: where ranges begin, so that the costliest stage is as
cheap as can be, and of the cuts that come near to that the one that is best by a second measure. It knows no models:
ops are cut with it when a program is compiled, units of a model when plans are compared.
(The recursion is that of Zheng et al. 2022, "Alpa", section 5.2, for stages of one shape.)
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def between(sums: Sequence[float]) -> Array:
    """Of sums over all entries before each place: what lies between two places, at [i, j]; infinite where j <= i."""
    before = np.asarray(sums, dtype=np.float64)
    table = before[None, :] - before[:, None]
    table[np.tril_indices(len(before))] = np.inf
    return table


def best_starts(
    costs: Sequence[Array], second: Callable[[Array], Array], slack: float
) -> tuple[tuple[int, ...], float] | None:
    """(where the second and later stages begin, cost of the costliest); None where no cut is allowed.

    `costs[s][i, j]` is what stage s costs with the range from place i to place j, infinite where it may not have it. Of
    the cuts whose costliest stage costs at most `slack` times the least, the one is taken whose `second(costs[s])` add
    up to the least.
    """
    least, _ = _walk(costs, np.maximum)
    if not np.isfinite(least):
        return None
    measured: dict[int, Array] = {}
    for table in costs:
        if id(table) not in measured:
            measured[id(table)] = np.where(table <= least * slack, second(table), np.inf)
    _, starts = _walk([measured[id(table)] for table in costs], np.add)
    return starts, least


def _walk(tables: Sequence[Array], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least value of one range from each table, end to end, and where the second and later ranges begin.

    `join` makes one number of the value of all ranges before and that of the next one.
    """
    count = len(tables[0]) - 1
    best: Array = np.full(count + 1, np.inf)
    best[0] = 0.0
    came = []
    for table in tables:
        value = join(best[:, None], table)
        came.append(np.argmin(value, axis=0))
        best = value[came[-1], np.arange(count + 1)]
    starts: list[int] = []
    end = count
    for back in came[:0:-1]:
        end = int(back[end])
        starts.append(end)
    return float(best[count]), tuple(reversed(starts))
