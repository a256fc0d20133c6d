"""Fields of samples that are trees: nested tuples or lists that differ from sample to sample.

Goes in: samples, each a tuple of fields. Comes out: which fields are trees, and samples in which they are kept whole
so that a batch has them in a list. Nested numbers that are alike in all samples are columns, as torch collates them.
"""

from typing import Any

LOOKED_AT = 32
"""Samples that are looked at to tell a field of trees from one of columns."""


class Tree:
    """What a batch keeps as it is, in a list."""

    def __init__(self, nested: Any) -> None:
        self.nested = nested


def fields(sample: Any, depth: int) -> set[int]:
    """Fields of a sample, which is a tuple of them, that are tuples or lists; `depth` 2: of others."""
    if type(sample) not in (tuple, list):
        return set()
    nested = {at: field for at, field in enumerate(sample) if isinstance(field, tuple | list)}
    return {
        at
        for at, field in nested.items()
        if depth == 1 or any(isinstance(part, tuple | list) for part in field)
    }


def tree_fields(samples: list[Any]) -> frozenset[int]:
    """Nested fields that are not alike in all samples: trees."""
    if len({len(sample) if type(sample) in (tuple, list) else -1 for sample in samples}) > 1:
        return frozenset()
    nested = set().union(*(fields(sample, depth=2) for sample in samples))
    return frozenset(at for at in nested if len({_nesting(sample[at]) for sample in samples}) > 1)


def _nesting(field: Any) -> tuple[int, ...]:
    """How tuples and lists are nested: how many parts each has, level by level."""
    counts, left = [], [field]
    for part in left:  # grows meanwhile: no recursion, however deep it is
        nested = isinstance(part, tuple | list)
        counts.append(len(part) if nested else -1)
        left.extend(part if nested else ())
    return tuple(counts)


def with_trees(sample: Any, trees: frozenset[int] | None) -> Any:
    if not trees:
        return sample
    return tuple(Tree(field) if at in trees else field for at, field in enumerate(sample))
