"""The graphs of a batch's samples as one: flat arrays over all vertices.

In: the samples. Out: a `Forest`. Nested tuples, the usual trees, are read all at once, level by level from the roots:
then the children of a vertex follow each other, and nothing is done in Python for an edge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.dynamic.structure import Array, Structure
from plait.errors import DataError

_LEAVES = (int, float, Tensor)
"""What a leaf of nested tuples may be, so that they can be read all at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forest:
    """All vertices of a batch. Those of one sample are in its own order, samples may be mixed."""

    samples: Array
    """Whose vertex each is."""
    num_samples: int
    first: Array
    """Where each vertex's children begin in `children`."""
    counts: Array
    children: Array
    levels: Array
    kinds: Array
    names: tuple[Any, ...]
    has_input: Array
    inputs: Tensor | None
    """A row for each vertex that has an input, sample by sample."""
    roots: Array
    """Sample by sample."""

    @classmethod
    def of(cls, samples: Sequence[Structure]) -> "Forest":
        """Of samples that were read one by one."""
        index: dict[Any, int] = {}
        for sample in samples:
            for name in sample.names:
                index.setdefault(name, len(index))
        tables = [np.array([index[name] for name in sample.names])[sample.kinds] for sample in samples]
        sizes = np.array([len(sample) for sample in samples])
        offsets = np.cumsum(sizes) - sizes
        counts = np.concatenate([np.diff(sample.first) for sample in samples])
        return cls(
            samples=np.repeat(np.arange(len(samples)), sizes),
            num_samples=len(samples),
            first=np.cumsum(counts) - counts,
            counts=counts,
            children=np.concatenate(
                [s.children + offset for s, offset in zip(samples, offsets, strict=True)]
            ),
            levels=np.concatenate([sample.levels for sample in samples]),
            kinds=np.concatenate(tables),
            names=tuple(index),
            has_input=np.concatenate([sample.has_input for sample in samples]),
            inputs=_joined([sample.inputs for sample in samples if sample.inputs is not None]),
            roots=np.concatenate([s.roots + offset for s, offset in zip(samples, offsets, strict=True)]),
        )

    @classmethod
    def of_tuples(cls, trees: Sequence[Any]) -> "Forest | None":
        """Of nested tuples with numbers or tensors at their leaves; None: they are something else."""
        vertices: list[Any] = list(trees)
        counts: list[int] = []
        note, more = counts.append, vertices.extend
        for vertex in vertices:  # grows meanwhile
            if type(vertex) is tuple:
                note(len(vertex))
                more(vertex)
            elif type(vertex) in _LEAVES:
                note(0)
            else:
                return None
        sizes = np.array(counts)
        parents = np.repeat(np.arange(len(sizes)), sizes)
        samples = np.empty(len(sizes), dtype=np.int64)
        samples[: len(trees)] = np.arange(len(trees))
        levels = np.zeros(len(sizes), dtype=np.int64)
        layers, start, end = [], 0, len(trees)
        while start < end:
            layers.append((start, end))
            below = end + int(sizes[start:end].sum())
            samples[end:below] = samples[parents[end - len(trees) : below - len(trees)]]
            start, end = end, below
        for start, end in reversed(layers[1:]):
            above = parents[start - len(trees) : end - len(trees)]
            np.maximum.at(levels, above, levels[start:end] + 1)
        is_leaf = np.fromiter(
            (type(vertex) is not tuple for vertex in vertices), dtype=bool, count=len(sizes)
        )
        leaves = [vertex for vertex in vertices if type(vertex) is not tuple]
        try:
            rows = _rows(leaves)
        except (TypeError, ValueError, RuntimeError):
            return None  # read one by one, which names the vertex
        in_order = np.argsort(samples[is_leaf], kind="stable")
        return cls(
            samples=samples,
            num_samples=len(trees),
            first=np.cumsum(sizes) - sizes,
            counts=sizes,
            children=np.arange(len(trees), len(sizes)),
            levels=levels,
            kinds=np.zeros(len(sizes), dtype=np.int64),
            names=(None,),
            has_input=is_leaf,
            inputs=rows[torch.from_numpy(in_order)] if rows is not None else None,
            roots=np.arange(len(trees)),
        )


def _rows(leaves: list[Any]) -> Tensor | None:
    if not leaves:
        return None
    if type(leaves[0]) is Tensor:
        return torch.stack(leaves)
    rows = np.array(leaves)
    return torch.as_tensor(rows, dtype=torch.get_default_dtype() if rows.dtype.kind == "f" else None)


def _joined(given: Sequence[Tensor]) -> Tensor | None:
    try:
        return torch.cat(list(given)) if given else None
    except (RuntimeError, TypeError) as error:
        shapes = sorted({str(tuple(rows.shape[1:])) for rows in given})
        raise DataError(
            f"inputs of vertices differ between samples: shapes {', '.join(shapes)}.",
            fix="give all vertices inputs of one shape and type.",
        ) from error


def read_batch(graphs: Sequence[Any], read: Callable[[int, Any], Structure], *, plain: bool) -> Forest:
    """All samples: nested tuples at once where that is the way to read them (`plain`), others one by one."""
    forest = Forest.of_tuples(graphs) if plain else None
    return (
        forest
        if forest is not None
        else Forest.of([read(number, graph) for number, graph in enumerate(graphs)])
    )
