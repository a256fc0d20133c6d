"""Between operators: which units of a model each stage of a pipeline gets, by dynamic programming.

In: what every unit costs in time, in state and in activations on one shape of sub-mesh (the ranks of `data` and `tensor`
that share a stage), and how many micro-batches each stage keeps. Out: where stages begin, so that the slowest is as fast
as can be and every stage has room; of equal ones the most even. It is exact for each sub-mesh; `candidates.py` walks
through the shapes of sub-meshes. A mesh is a grid, so all stages have sub-meshes of one shape.
(The recursion is that of Zheng et al. 2022, "Alpa", section 5.2, for stages of one shape.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The units of a model in order, as one rank of a sub-mesh sees them."""

    seconds: tuple[float, ...]
    """Forward and backward of one micro-batch."""
    state_bytes: tuple[float, ...]
    """Parameters, gradients and optimizer state."""
    kept_bytes: tuple[float, ...]
    """What one micro-batch leaves for its backward."""

    def __post_init__(self) -> None:
        assert len(self.seconds) == len(self.state_bytes) == len(self.kept_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where stages begin."""

    starts: tuple[int, ...]
    """The first unit of the second and later stages."""
    slowest_s: float
    """Time of the slowest stage for one micro-batch."""


def best_cut(
    row: Row, *, in_flight: Sequence[float], limit_bytes: float, virtual: int = 1, overlap: float = 1e-3
) -> Cut | None:
    """The cut into `len(in_flight)` stages; None where no cut has room.

    `in_flight` are the micro-batches that each stage keeps; with several stages a rank (`virtual`), each has its part of
    the limit. `overlap` weighs evenness against the slowest stage, in which all that matters is equal.
    """
    stages, count = len(in_flight), len(row.seconds)
    if stages > count:
        return None
    time, state, kept = (_between(values) for values in (row.seconds, row.state_bytes, row.kept_bytes))
    # best[i]: the slowest stage among those that cover the first i units, in one number with how uneven they are.
    even = sum(row.seconds) / stages
    best: Array = np.full(count + 1, np.inf)
    best[0] = 0.0
    uneven: Array = np.zeros(count + 1)
    came = np.zeros((stages, count + 1), dtype=np.int64)
    for stage in range(stages):
        fits = (state + kept * in_flight[stage]) * virtual <= limit_bytes
        slowest = np.where(fits, np.maximum(best[:, None], time), np.inf)
        spread = uneven[:, None] + (time - even) ** 2
        value = slowest + overlap * spread / max(even, 1e-30)
        came[stage] = np.argmin(value, axis=0)
        columns = np.arange(count + 1)
        best, uneven = slowest[came[stage], columns], spread[came[stage], columns]
    if not np.isfinite(best[count]):
        return None
    starts: list[int] = []
    end = count
    for stage in range(stages - 1, 0, -1):
        end = int(came[stage][end])
        starts.append(end)
    return Cut(starts=tuple(reversed(starts)), slowest_s=float(best[count]))


def _between(values: Sequence[float]) -> Array:
    """Sums over units i..j-1 at [i, j]; infinite where there is no unit."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums))] = np.inf
    return np.asarray(table, dtype=np.float64)
