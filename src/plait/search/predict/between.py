"""Between operators: which units of a model each stage of a pipeline gets.

In: what every unit costs in time, in state and in activations on one shape of sub-mesh (the ranks of `data` and
`tensor` that share a stage), and how many micro-batches each stage keeps. Out: where stages begin, so that the slowest
is as fast as can be and every stage has room; of equal ones the most even. It is exact for each sub-mesh;
`candidates.py` walks through the shapes of sub-meshes. A mesh is a grid, so all stages have sub-meshes of one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from plait.program.stage.partition import Array, best_starts, between


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
    state, kept = _table(row.state_bytes), _table(row.kept_bytes)
    ends = [0, *anywhere.starts, len(row.seconds)]
    needs = [state[a, b] + kept[a, b] * n for (a, b), n in zip(pairwise(ends), in_flight, strict=True)]
    if max(needs) * virtual <= limit_bytes:
        return anywhere
    least = sum(row.state_bytes) + min(in_flight) * sum(row.kept_bytes)
    if least * virtual > limit_bytes * len(in_flight):
        return None
    time = _table(row.seconds)
    limited = [np.where((state + kept * n) * virtual <= limit_bytes, time, np.inf) for n in in_flight]
    return _most_even(limited, sum(row.seconds) / len(in_flight))


@lru_cache(maxsize=1024)
def _cut_anywhere(seconds: tuple[float, ...], stages: int) -> Cut:
    """The cut where memory does not matter; many plans share it."""
    found = _most_even([_table(seconds)] * stages, sum(seconds) / stages)
    assert found is not None
    return found


def _most_even(tables: Sequence[Array], even_s: float) -> Cut | None:
    """The cut with the fastest slowest stage, of these the most even; `tables` are the times of stages."""
    found = best_starts(tables, lambda table: (table - even_s) ** 2, 1 + 1e-9)
    return None if found is None else Cut(starts=found[0], slowest_s=found[1])


def _table(values: Sequence[float]) -> Array:
    return between([0.0, *accumulate(values)])
