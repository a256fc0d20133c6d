"""One problem of extraction as an integer program, for HiGHS.

In: classes that hang together, the ways of each with prices. Out: the cheapest way of each, or None where what was
written is as good as what is found. The search ends with its first relaxation, not with a time: so it ends alike on
every machine. On the graphs of `bench/rewrite.py` what is found there is what 20 s more found.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used

from plait.graph.cost import value_bytes
from plait.rewrite.price import Priced
from plait.rewrite.saturate import Classes

Choice = Mapping[int, int]
"""Class -> which of its ways."""
_GAP = 0.005
"""How far from the best a solution of HiGHS may be, of what a problem costs."""


def solve(
    order: Sequence[int],
    classes: Classes,
    priced: Priced,
    allowed: Sequence[Sequence[int]],
    fixed: set[int],
    written: Choice,
    memory: float,
) -> tuple[int, ...] | None:
    """Of each class which of its allowed ways, -1 where it is not computed; None: as it was written."""
    at = {own: position for position, own in enumerate(order)}
    columns = [(own, index) for own in order for index in allowed[own]]
    first = {own: sum(len(allowed[other]) for other in order[: at[own]]) for own in order}
    cost = np.array([priced.seconds[own][index] for own, index in columns])
    size = [_stored(own, index, classes, priced) for own, index in columns]
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(row: dict[int, float], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for own in order:
        span = range(first[own], first[own] + len(allowed[own]))
        constrain(dict.fromkeys(span, 1.0), 1.0 if own in fixed else 0.0, 1.0)
    for column, (own, index) in enumerate(columns):
        for source in set(classes.ways[own][index].tensors):
            if source in at and source not in fixed:
                span = range(first[source], first[source] + len(allowed[source]))
                constrain({column: -1.0, **dict.fromkeys(span, 1.0)}, 0.0, inf)
    before = sum(_stored(own, written[own], classes, priced) for own in order if own in written)
    constrain({c: s for c, s in enumerate(size) if s}, 0.0, max(memory * before, 1.0))
    width = len(columns)
    result = scipy.optimize.milp(
        cost,
        constraints=scipy.optimize.LinearConstraint(_matrix(rows, width), low, high),
        integrality=np.ones(width),
        bounds=scipy.optimize.Bounds(0, 1),
        options={
            "node_limit": 1,
            "mip_rel_gap": _GAP,
        },  # what its first relaxation leads to, however long it takes
    )
    if result.x is None:
        return None
    chosen = {columns[c][0]: columns[c][1] for c in np.flatnonzero(result.x[:width] > 0.5)}
    if sum(priced.seconds[own][index] for own, index in chosen.items()) >= sum(
        priced.seconds[own][written[own]] for own in order if own in written
    ):
        return None  # nothing better was found
    return tuple(allowed[own].index(chosen[own]) if own in chosen else -1 for own in order)


def _stored(own: int, index: int, classes: Classes, priced: Priced) -> float:
    """Bytes that a way writes; a view writes none."""
    word = classes.ways[own][index].word
    return 0.0 if word in ("in", "t", "perm", "slice", "view") else float(value_bytes(priced.values[own]))


def _matrix(rows: Sequence[Mapping[int, float]], width: int) -> Any:
    data = [value for row in rows for value in row.values()]
    columns = [column for row in rows for column in row]
    starts = np.cumsum([0, *(len(row) for row in rows)])
    return scipy.sparse.csr_array((data, columns, starts), shape=(len(rows), width))
