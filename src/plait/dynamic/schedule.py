"""In which order the vertices of a batch are evaluated, and together with which others.

In: the vertices of a batch. Out: groups of vertices of one level that are of one kind and see as many
others: each is one call. The states of all vertices lie in one buffer in the order of evaluation, so that a group
writes a slice of it; what a group sees is gathered from there.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plait.dynamic.evaluate import Group
from plait.dynamic.forest import Forest
from plait.dynamic.structure import Array


class Family(NamedTuple):
    """Vertices that one traced function serves, with buffers of one shape."""

    kind: Any
    has_input: bool
    num_children: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A batch, in the order of evaluation."""

    groups: tuple[Group, ...]
    num_rows: dict[Family, int]
    """Rows of each family."""
    inputs: dict[Family, Tensor]
    """Which rows of the batch's inputs they take."""
    vertices: Tensor
    """Where each vertex's row is, sample by sample in the order of the user."""
    roots: Tensor
    """The rows of all roots, sample by sample."""
    num_roots: tuple[int, ...]
    sizes: tuple[int, ...]
    """Vertices of each sample."""
    level_sizes: tuple[int, ...]
    """Vertices of each level."""

    @property
    def total_rows(self) -> int:
        """Of all families: fewer than vertices, where some have one state."""
        return sum(self.num_rows.values())

    @property
    def num_vertices(self) -> int:
        return sum(self.sizes)

    def place(self, row: int) -> str:
        """Whose state a row is: of the first vertex that has it."""
        at = int((self.vertices == row).nonzero()[0])
        ends = np.cumsum(self.sizes)
        sample = int(np.searchsorted(ends, at, side="right"))
        return f"sample {sample} of the batch, vertex {at - int(ends[sample]) + self.sizes[sample]}"


def scheduled(forest: Forest, num_states: int, *, merges: bool) -> Schedule:
    """The schedule of a batch whose states have so many parts, each with a buffer of its own.

    With `merges`, leaves with equal whole numbers as inputs, such as words, are one row: they have equal states.
    """
    counts, first, children = forest.counts, forest.first, forest.children
    by_sample = np.argsort(forest.samples, kind="stable")
    input_of = np.empty(len(counts), dtype=np.int64)
    input_of[by_sample] = np.cumsum(forest.has_input[by_sample]) - 1
    same = _same_leaves(forest, input_of) if merges else np.arange(len(counts))
    own = np.flatnonzero(same == np.arange(len(counts)))
    order = own[np.lexsort((counts[own], forest.has_input[own], forest.kinds[own], forest.levels[own]))]
    row_of = np.empty(len(counts), dtype=np.int64)
    row_of[order] = np.arange(len(order))
    row_of = row_of[same]
    keys = np.stack([forest.levels, forest.kinds, forest.has_input, counts])[:, order]
    starts = np.flatnonzero(np.concatenate(([True], (keys[:, 1:] != keys[:, :-1]).any(0))))
    ends = np.append(starts[1:], len(order))

    groups: list[Group] = []
    members: dict[Family, list[Array]] = {}
    reached: dict[Family, int] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        _, kind, given, number = keys[:, start].tolist()
        family = Family(forest.names[kind], bool(given), number)
        vertices = order[start:end]
        seen = (
            row_of[children[(first[vertices][:, None] + np.arange(number)).reshape(-1)]]
            if number
            else first[:0]
        )
        within = reached.get(family, 0)
        reached[family] = within + end - start
        members.setdefault(family, []).append(vertices)
        rows = torch.from_numpy(seen)
        groups.append(
            Group(
                family=family,
                within=within,
                num_rows=end - start,
                seen=tuple((part, rows) for part in range(num_states if number else 0)),
                into=tuple((part, start) for part in range(num_states)),
            )
        )
    together = {family: np.concatenate(parts) for family, parts in members.items()}
    return Schedule(
        groups=tuple(groups),
        num_rows=reached,
        inputs={f: torch.from_numpy(input_of[vertices]) for f, vertices in together.items() if f.has_input},
        vertices=torch.from_numpy(row_of[by_sample]),
        roots=torch.from_numpy(row_of[forest.roots]),
        num_roots=_per_sample(forest, forest.roots),
        sizes=_per_sample(forest, by_sample),
        level_sizes=tuple(np.bincount(forest.levels).tolist()),
    )


def _same_leaves(forest: Forest, input_of: Array) -> Array:
    """Of each vertex the one that stands for it: the first leaf of its kind with the same whole number."""
    same = np.arange(len(forest.counts))
    leaves = np.flatnonzero((forest.counts == 0) & forest.has_input)
    if (
        forest.inputs is None
        or forest.inputs.dim() != 1
        or forest.inputs.is_floating_point()
        or not len(leaves)
    ):
        return same
    values = forest.inputs.cpu().numpy()[input_of[leaves]]
    _, numbers = np.unique(values, return_inverse=True)
    _, firsts, inverse = np.unique(
        numbers * len(forest.names) + forest.kinds[leaves], return_index=True, return_inverse=True
    )
    same[leaves] = leaves[firsts][inverse]
    return same


def _per_sample(forest: Forest, vertices: Array) -> tuple[int, ...]:
    return tuple(np.bincount(forest.samples[vertices], minlength=forest.num_samples).tolist())
