"""Between operators: which units of a model each stage of a pipeline gets, by dynamic programming.

In: what every unit costs in time, in state and in activations on one shape of sub-mesh (the ranks of `data` and
`tensor` that share a stage), and how many micro-batches each stage keeps. Out: where stages begin, so that the slowest
is as fast as can be and every stage has room; of equal ones the most even. It is exact for each sub-mesh;
`candidates.py` walks through the shapes of sub-meshes. A mesh is a grid, so all stages have sub-meshes of one shape.
(The recursion is that of Zheng et al. 2022, "Alpa", section 5.2, for stages of one shape.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

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


def best_cut(row: Row, *, in_flight: Sequence[float], limit_bytes: float, virtual: int = 1) -> Cut | None:
    """The cut into `len(in_flight)` stages; None where no cut has room.

    `in_flight` are the micro-batches that each stage keeps; with several stages a rank (`virtual`), each has its part
    of the limit.
    """
    if len(in_flight) > len(row.seconds):
        return None
    anywhere = _cut_anywhere(row.seconds, len(in_flight))
    state, kept = _between(row.state_bytes), _between(row.kept_bytes)
    ends = [0, *anywhere.starts, len(row.seconds)]
    needs = [state[a, b] + kept[a, b] * n for (a, b), n in zip(pairwise(ends), in_flight, strict=True)]
    if max(needs) * virtual <= limit_bytes:
        return anywhere
    least = sum(row.state_bytes) + min(in_flight) * sum(row.kept_bytes)
    if least * virtual > limit_bytes * len(in_flight):
        return None
    time = _between(row.seconds)
    limited = [np.where((state + kept * n) * virtual <= limit_bytes, time, np.inf) for n in in_flight]
    return _most_even(limited, sum(row.seconds) / len(in_flight))


@lru_cache(maxsize=1024)
def _cut_anywhere(seconds: tuple[float, ...], stages: int) -> Cut:
    """The cut where memory does not matter; many plans share it."""
    found = _most_even([_between(seconds)] * stages, sum(seconds) / stages)
    assert found is not None
    return found


def _most_even(tables: Sequence[Array], even_s: float) -> Cut | None:
    """The cut with the fastest slowest stage, of these the most even; `tables` are the times of stages."""
    slowest_s, _ = _walk(tables, np.maximum)
    if not np.isfinite(slowest_s):
        return None
    uneven: dict[int, Array] = {}
    for table in tables:
        if id(table) not in uneven:
            uneven[id(table)] = np.where(table <= slowest_s * (1 + 1e-9), (table - even_s) ** 2, np.inf)
    _, starts = _walk([uneven[id(table)] for table in tables], np.add)
    return Cut(starts=starts, slowest_s=slowest_s)


def _walk(tables: Sequence[Array], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least value of one range of units from each table, end to end, and where the second and later ranges begin.

    `tables[s][i, j]` is what stage s costs with the units i..j-1; `join` makes one number of what came before and that.
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


def _between(values: Sequence[float]) -> Array:
    """Sums over units i..j-1 at [i, j]; infinite where there is no unit."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums))] = np.inf
    return np.asarray(table, dtype=np.float64)
