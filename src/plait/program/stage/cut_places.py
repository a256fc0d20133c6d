"""The same cut of a model in graphs of other sizes, whose ops may differ here and there.

In: the forward ops of two graphs, as texts. Out: which places between the ops of one are which places of the other. A
micro-batch of one sample may need other ops than one of two: a linear layer on a tensor that happens to be contiguous
is one op, else three. No stage may begin between such ops, or parameters would change their stage from step to step.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher

from plait.errors import PlanError


def same_places(ours: Sequence[str], theirs: Sequence[str]) -> dict[int, int]:
    """Places in `ours` (the number of ops before them) that `theirs` has too, and where."""
    if ours == theirs:
        return {place: place for place in range(len(ours) + 1)}
    found: dict[int, int] = {}
    taken: set[int] = set()
    for block in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        for offset in range(block.size + 1):
            place, other = block.a + offset, block.b + offset
            if place not in found and other not in taken:  # no two places are one: a stage has ops in both
                found[place] = other
                taken.add(other)
    return found


def moved(starts: Sequence[int], ours: Sequence[str], theirs: Sequence[str]) -> tuple[int, ...]:
    """Where stages begin in `theirs` that begin at `starts` in `ours`."""
    places = same_places(ours, theirs)
    for start in starts:
        if start not in places:
            raise PlanError(
                f"pipe: a stage begins with {ours[start]}, which a micro-batch of another size does not have.",
                fix="name modules in pipe.cut, or use a batch of which all micro-batches are of one size.",
            )
    return tuple(places[start] for start in starts)
