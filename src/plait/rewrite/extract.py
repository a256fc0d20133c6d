"""Exact extraction: of each class that is needed the way that makes the whole cheapest.

In: classes with prices, the classes that are needed. Out: the way of each class that is computed. What is computed
under every choice is fixed first; the rest falls apart into small problems, each an integer program for HiGHS, and
problems that are alike, such as those of repeated blocks, are solved once.
"""

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
import scipy  # its parts are imported when they are first used

from plait.graph.cost import value_bytes
from plait.rewrite.price import Priced
from plait.rewrite.saturate import Classes
from plait.rewrite.solve import Choice, solve

_AFTER = 1e-3
"""How far something new comes after what it is made of, where terms are 1 apart."""
_MOST_COLUMNS = 6000
"""Ways among which HiGHS chooses, of all problems that are not alike; what comes after stays as it was written."""


def extract(
    classes: Classes, priced: Priced, roots: Iterable[int], written: Choice, memory: float
) -> dict[int, int]:
    """The cheapest ways; `written`: those of the graph as it was, which stay where nothing better is found.

    What a problem's values take in all is at most `memory` times what they took as written. Limits are of work, not
    of time: ranks that choose on their own choose the same.
    """
    needed, left = list(roots), _MOST_COLUMNS
    allowed = _without_circles(classes, _allowed(classes, priced, written), _order(classes))
    fixed = _forced(classes, allowed, needed)
    while _settle(classes, priced, allowed, fixed, written):
        fixed = _forced(classes, allowed, needed)
    solved: dict[object, tuple[int, ...] | None] = {}
    found: dict[int, int] = {}
    for own in fixed:
        if len(allowed[own]) == 1:
            found[own] = allowed[own][0]
    for problem in _problems(classes, allowed, fixed):
        key, order = _alike(problem, classes, priced, allowed, fixed)
        if key not in solved:
            left -= sum(len(allowed[own]) for own in order)
            solved[key] = (
                solve(order, classes, priced, allowed, fixed, written, memory) if left >= 0 else None
            )
        chosen = solved[key]
        if chosen is None:
            found |= {own: written[own] for own in order if own in written}
        else:
            found |= {own: allowed[own][at] for own, at in zip(order, chosen, strict=True) if at >= 0}
    return _reached(classes, found, needed)


def _allowed(classes: Classes, priced: Priced, written: Choice) -> list[list[int]]:
    """Ways that can be: those that cost something finite, and of what the forward computes, those it can compute.

    Of tensors side by side, which are put together at once however they are nested, those nested to the left; of
    parts, those of the largest: all neighbours are merged or none, of which there are few choices instead of many.
    """
    found = [
        [
            index
            for index, way in enumerate(ways)
            if priced.seconds[own][index] < inf
            and own not in way.tensors
            and (priced.backward[own] or not any(priced.backward[source] for source in way.tensors))
        ]
        for own, ways in enumerate(classes.ways)
    ]
    only_joined = [
        len({(w.word, w.numbers) for w in ways}) == 1 and ways[0].word == "cat" for ways in classes.ways
    ]

    def nested_right(own: int, index: int) -> bool:
        way = classes.ways[own][index]
        right = way.tensors[1] if way.word == "cat" else None
        return right is not None and only_joined[right] and classes.ways[right][0].numbers == way.numbers

    for own, ways in enumerate(found):
        joined = [index for index in ways if classes.ways[own][index].word == "cat"]
        others = {index for index in joined if nested_right(own, index) and index != written.get(own)}
        others = others if len(others) < len(joined) else set()
        sizes = {
            index: value_bytes(priced.values[classes.ways[own][index].tensors[0]])
            for index in ways
            if classes.ways[own][index].word == "slice"
        }
        others |= {i for i, size in sizes.items() if size < max(sizes.values()) and i != written.get(own)}
        found[own] = [index for index in ways if index not in others]
    return found


def _forced(classes: Classes, allowed: Sequence[Sequence[int]], roots: Iterable[int]) -> set[int]:
    """Classes that are computed under every choice."""
    found: set[int] = set()
    stack = list(roots)
    while stack:
        own = stack.pop()
        if own in found:
            continue
        found.add(own)
        sources = [set(classes.ways[own][index].tensors) for index in allowed[own]]
        stack.extend(set.intersection(*sources) if sources else ())
    return found


def _problems(classes: Classes, allowed: Sequence[Sequence[int]], fixed: set[int]) -> list[list[int]]:
    """Classes with a choice and what their ways need, by what hangs together: what has no choice joins none."""
    parent: dict[int, int] = {}

    def root(own: int) -> int:
        while parent[own] != own:
            parent[own] = parent[parent[own]]
            own = parent[own]
        return own

    stack = [own for own in fixed if len(allowed[own]) > 1]
    while stack:
        own = stack.pop()
        if own in parent:
            continue
        parent[own] = own
        for index in allowed[own]:
            stack.extend(
                source for source in classes.ways[own][index].tensors
                if source not in fixed or len(allowed[source]) > 1
            )  # fmt: skip
    for own in parent:
        for index in allowed[own]:
            for source in classes.ways[own][index].tensors:
                if source in parent:
                    parent[root(source)] = root(own)
    groups: dict[int, list[int]] = {}
    for own in parent:
        groups.setdefault(root(own), []).append(own)
    return [sorted(group) for group in groups.values()]


def _without_circles(classes: Classes, allowed: list[list[int]], order: Sequence[float]) -> list[list[int]]:
    """Without ways that go against the order, among classes that can lead back to themselves.

    The order is that of the captured graph, whose own ways all stay; what is new comes after what it is made of.
    """
    pairs = [
        (own, source)
        for own, ways in enumerate(allowed)
        for index in ways
        for source in classes.ways[own][index].tensors
    ]
    rows, columns = zip(*pairs, strict=True) if pairs else ((), ())
    links = scipy.sparse.csr_array((np.ones(len(pairs)), (rows, columns)), shape=(len(allowed), len(allowed)))
    _, label = scipy.sparse.csgraph.connected_components(links, directed=True, connection="strong")
    kept = [
        [
            index
            for index in ways
            if not any(
                label[source] == label[own] and order[source] >= order[own]
                for source in classes.ways[own][index].tensors
            )
        ]
        for own, ways in enumerate(allowed)
    ]
    users: dict[int, list[int]] = {}
    for own, source in pairs:
        users.setdefault(source, []).append(own)
    dead = [own for own, ways in enumerate(kept) if not ways]
    while dead:
        gone = dead.pop()
        for own in users.get(gone, ()):
            left = [index for index in kept[own] if gone not in classes.ways[own][index].tensors]
            if kept[own] and not left:
                dead.append(own)
            kept[own] = left
    return kept


def _order(classes: Classes) -> list[float]:
    """Of each class, where it stands in the captured graph; of what is new, after what it can first be made of."""
    found = [inf] * len(classes.ways)
    for at, own in enumerate(classes.of_term):
        found[own] = min(found[own], float(at))
    left = [own for own, at in enumerate(found) if at == inf]
    changed = True
    while changed:
        changed = False
        for own in left:
            best = min(
                (max((found[source] for source in way.tensors), default=inf) for way in classes.ways[own]),
                default=inf,
            )
            if best + _AFTER < found[own]:
                found[own] = best + _AFTER
                changed = True
    return found


def _settle(
    classes: Classes, priced: Priced, allowed: list[list[int]], fixed: set[int], written: Choice
) -> bool:
    """Leave out what cannot be better than the way as written, where that costs no more and all it needs is there."""
    before = sum(map(len, allowed))
    for own, ways in enumerate(allowed):
        now = written.get(own)
        if len(ways) > 1 and now in ways and set(classes.ways[own][now].tensors) <= fixed:
            least = min(priced.seconds[own][index] for index in ways)
            if priced.seconds[own][now] <= least:
                allowed[own] = [now]
    return sum(map(len, allowed)) < before


def _alike(
    problem: Sequence[int],
    classes: Classes,
    priced: Priced,
    allowed: Sequence[Sequence[int]],
    fixed: set[int],
) -> tuple[object, list[int]]:
    """What problems have in common that have one solution, and the order of classes in which they have it.

    Classes are numbered as they come from the first one that is fixed; those outside of the problem are all alike, but
    for which of them are the same.
    """
    inside = set(problem)
    order: list[int] = []
    number: dict[int, int] = {}
    outside: dict[int, int] = {}
    stack = [own for own in reversed(problem) if own in fixed]
    rows: list[object] = []
    while stack:
        own = stack.pop()
        if own in number:
            continue
        number[own] = len(order)
        order.append(own)
        for index in reversed(allowed[own]):
            stack.extend(s for s in reversed(classes.ways[own][index].tensors) if s in inside)
    for own in order:
        ways = tuple(
            (
                classes.ways[own][i].word,
                priced.seconds[own][i],
                tuple(
                    ("in", number[s]) if s in inside else ("out", outside.setdefault(s, len(outside)))
                    for s in classes.ways[own][i].tensors
                ),
            )
            for i in allowed[own]
        )
        rows.append((own in fixed, value_bytes(priced.values[own]), ways))
    return tuple(rows), order


def _reached(classes: Classes, found: Choice, roots: Iterable[int]) -> dict[int, int]:
    """What is really needed of what was chosen."""
    kept: dict[int, int] = {}
    stack = list(roots)
    while stack:
        own = stack.pop()
        if own not in kept:
            kept[own] = found[own]
            stack.extend(classes.ways[own][found[own]].tensors)
    return kept
