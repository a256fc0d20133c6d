"""The graph of one sample: its vertices, which of them each one sees, and the inputs that they bring.

In: nested tuples or lists, objects with children, lists of edges or parents, graphs of networkx or torch_geometric.
Out: a `Structure`: flat arrays, with every vertex's level, in which it comes after all that it sees. Nothing here calls
itself, so a chain may be as deep as memory allows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CaptureError, DataError
from plait.torch_private.tracing import is_tracing

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Structure:
    """The graph of one sample. Vertices have numbers from 0, in the order in which they were given."""

    first: Array
    """Where each vertex's children begin in `children`, and where the last one's end."""
    children: Array
    levels: Array
    """0 without children, else one more than the highest child's."""
    kinds: Array
    """What each vertex is, as an index into `names`."""
    names: tuple[Any, ...]
    has_input: Array
    inputs: Tensor | None
    """A row for each vertex that has an input, in their order."""
    roots: Array
    """The vertices that no other one sees."""

    def __len__(self) -> int:
        return len(self.levels)

    @classmethod
    def of_edges(
        cls,
        num_vertices: int,
        edges: Sequence[tuple[int, int]] | Tensor | Array,
        *,
        inputs: Tensor | Sequence[Any] | None = None,
        kinds: Sequence[Any] | None = None,
    ) -> "Structure":
        """From edges (seen, seeing): pairs, or two rows as torch_geometric has them.

        `inputs` has a row for each vertex, None where one has none. A vertex sees others in the order of the edges.
        """
        pairs = _pairs(edges, num_vertices)
        order = np.argsort(pairs[:, 1], kind="stable")
        counts = np.bincount(pairs[:, 1], minlength=num_vertices)
        rows = [None] * num_vertices if inputs is None else inputs
        return _made(np.concatenate(([0], np.cumsum(counts))), pairs[order, 0], rows, kinds)

    @classmethod
    def of_parents(
        cls, parents: Sequence[int], *, inputs: Any = None, kinds: Sequence[Any] | None = None
    ) -> "Structure":
        """From each vertex's parent, -1 for a root."""
        edges = [(child, parent) for child, parent in enumerate(parents) if parent != -1]
        return cls.of_edges(len(parents), edges, inputs=inputs, kinds=kinds)

    @classmethod
    def of_rounds(
        cls, num_vertices: int, edges: Sequence[tuple[int, int]] | Tensor | Array, rounds: int, *, inputs: Any
    ) -> "Structure":
        """Message passing: in each round a vertex sees itself and its neighbours as they were in the round before.

        Edges may go in circles. Vertices of round 0 have the inputs and are of kind "start", those of round r, from
        r * num_vertices on, are of kind "round" and see themselves first.
        """
        pairs = _pairs(edges, num_vertices)
        _count("inputs", inputs, num_vertices)
        own = np.stack([np.arange(num_vertices)] * 2, 1)
        step = np.concatenate([own, pairs]) if len(pairs) else own
        shifts = [np.array((r, r + 1)) * num_vertices for r in range(rounds)]
        every = np.concatenate([step[:0], *(step + shift for shift in shifts)])
        total = num_vertices * (rounds + 1)
        kinds = ["start"] * num_vertices + ["round"] * (total - num_vertices)
        rows = [*inputs] + [None] * (total - num_vertices)
        return cls.of_edges(total, every, inputs=rows, kinds=kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """How a sample's own objects are read."""

    children: Callable[[Any], Iterable[Any] | None] | None = None
    """What a vertex sees, in order; by default the items of a tuple or list, or its attribute `children`."""
    input: Callable[[Any], Any] | None = None
    """A vertex's own input or None; by default what is no tuple or list, or its attribute `input`."""
    kind: Callable[[Any], Any] | None = None
    """What a vertex is; by default its attribute `kind`."""

    def read(self, sample: Any) -> Structure:
        """The structure of one sample."""
        if isinstance(sample, Structure):
            return sample
        if self.children is None and (known := _of_library(sample)) is not None:
            return known
        if sample is None:
            raise DataError("it is None.", fix="leave such samples out.")
        return self._walked(sample)

    def _walked(self, root: Any) -> Structure:
        """Vertices in the order in which they are met from the root down. An object seen by two is one vertex."""
        vertices: list[Any] = [root]
        seen: dict[int, int] = {id(root): 0}
        first, children = [0], list[int]()
        at = 0
        while at < len(vertices):
            vertex = vertices[at]
            for child in self._children_of(vertex):
                if child is None:
                    raise DataError(
                        f"vertex {at} sees None, after {len(children) - first[-1]} others.",
                        fix="leave out what is missing: children=lambda v: [c for c in ... if c is not None].",
                    )
                # Leaves that are equal values (small numbers, strings) are vertices of their own.
                known = seen.get(id(child)) if _is_shared(child) else None
                if known is None:
                    known = len(vertices)
                    vertices.append(child)
                    seen[id(child)] = known
                children.append(known)
            first.append(len(children))
            at += 1
        inputs = [self._input_of(vertex) for vertex in vertices]
        kinds = None
        if self.kind is not None or hasattr(root, "kind"):
            kinds = [self.kind(v) if self.kind is not None else getattr(v, "kind", None) for v in vertices]
        return _made(np.array(first), np.array(children, dtype=np.int64), inputs, kinds)

    def _children_of(self, vertex: Any) -> Iterable[Any]:
        if self.children is not None:
            return self.children(vertex) or ()
        if isinstance(vertex, (tuple, list)):
            return vertex
        return getattr(vertex, "children", None) or ()

    def _input_of(self, vertex: Any) -> Any:
        if self.input is not None:
            return self.input(vertex)
        if isinstance(vertex, (tuple, list)):
            return None
        return getattr(vertex, "input", None) if hasattr(vertex, "children") else vertex


def refuse_tracing() -> None:
    """Graphs of samples are read in Python: code that is being captured would hold the first batch's for good."""
    if is_tracing():
        raise CaptureError(
            "its graph differs from sample to sample.",
            fix="nothing: it runs eagerly, in batches of its own.",
        )


def _is_shared(vertex: Any) -> bool:
    return not isinstance(vertex, (int, float, str, bytes, bool, type(None)))


def _pairs(edges: Any, num_vertices: int) -> Array:
    pairs = np.asarray(edges.cpu() if isinstance(edges, Tensor) else edges)
    if not pairs.size:
        return np.zeros((0, 2), dtype=np.int64)
    if pairs.ndim == 2 and pairs.shape[0] == 2 and isinstance(edges, Tensor):
        pairs = pairs.T
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise DataError(
            f"edges have the shape {pairs.shape} and the type {pairs.dtype}.",
            fix="give pairs (seen, seeing) of whole numbers, or a tensor of 2 rows.",
        )
    if pairs.min() < 0 or pairs.max() >= num_vertices:
        bad = int(np.argmax((pairs.min(1) < 0) | (pairs.max(1) >= num_vertices)))
        raise DataError(
            f"edge {bad}, {tuple(pairs[bad].tolist())}, names a vertex that is not there; "
            f"there are {num_vertices}, from 0.",
            fix="count vertices from 0, or give num_vertices as many as there are.",
        )
    return pairs.astype(np.int64)


def _count(what: str, given: Sequence[Any] | Tensor, num_vertices: int) -> None:
    if len(given) != num_vertices:
        raise DataError(
            f"{len(given)} {what} for {num_vertices} vertices.",
            fix="give one for each vertex, None where one has none.",
        )


def _of_library(sample: Any) -> Structure | None:
    """A graph of torch_geometric or networkx."""
    if hasattr(sample, "edge_index"):
        inputs = getattr(sample, "x", None)
        number = getattr(sample, "num_nodes", None)
        number = int(number if number is not None else len(inputs))  # type: ignore[arg-type]
        return Structure.of_edges(number, sample.edge_index, inputs=inputs)
    if hasattr(sample, "nodes") and hasattr(sample, "edges") and hasattr(sample, "is_directed"):
        if not sample.is_directed():
            raise DataError(
                "its edges have no direction: they do not say which vertex sees which.",
                fix="give a DiGraph with edges (seen, seeing); for rounds of messages use Structure.of_rounds.",
            )
        numbers = {node: number for number, node in enumerate(sample.nodes)}
        edges = [(numbers[a], numbers[b]) for a, b, *_ in sample.edges]
        inputs = [data.get("input") for _, data in sample.nodes(data=True)]
        kinds = [data.get("kind") for _, data in sample.nodes(data=True)]
        return Structure.of_edges(len(numbers), edges, inputs=inputs, kinds=kinds)
    return None


def _made(first: Array, children: Array, inputs: Any, kinds: Sequence[Any] | None) -> Structure:
    num_vertices = len(first) - 1
    if not num_vertices:
        raise DataError("the graph has no vertex.", fix="leave such samples out, or give them one vertex.")
    _count("inputs", inputs, num_vertices)
    names: tuple[Any, ...] = (None,)
    numbers = np.zeros(num_vertices, dtype=np.int64)
    if kinds is not None:
        _count("kinds", kinds, num_vertices)
        names = tuple(dict.fromkeys(kinds))
        index = {name: number for number, name in enumerate(names)}
        numbers = np.fromiter((index[kind] for kind in kinds), dtype=np.int64, count=num_vertices)
    rows, has_input = _stacked(inputs, num_vertices)
    is_root = np.ones(num_vertices, dtype=bool)
    is_root[children] = False
    return Structure(
        first=first, children=children, levels=_levels(first, children), kinds=numbers, names=names,
        has_input=has_input, inputs=rows, roots=np.flatnonzero(is_root),
    )  # fmt: skip


def _levels(first: Array, children: Array) -> Array:
    """Level by level from the vertices without children; what is never reached is in a circle."""
    num_vertices = len(first) - 1
    waiting = np.diff(first)
    parents = np.repeat(np.arange(num_vertices), waiting)
    by_child = np.argsort(children, kind="stable")
    starts = np.searchsorted(children[by_child], np.arange(num_vertices + 1))
    levels = np.full(num_vertices, -1, dtype=np.int64)
    ready = np.flatnonzero(waiting == 0)
    level = 0
    while len(ready):
        levels[ready] = level
        counts = starts[ready + 1] - starts[ready]
        total = int(counts.sum())
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        told = parents[by_child[np.repeat(starts[ready], counts) + within]]
        np.subtract.at(waiting, told, 1)
        ready = np.unique(told[waiting[told] == 0])
        level += 1
    if (levels < 0).any():
        vertex = int(np.argmax(levels < 0))
        raise DataError(
            f"vertex {vertex} sees itself, over others or at once: edges go in a circle.",
            fix="turn or drop an edge of the circle; for rounds of messages use Structure.of_rounds.",
        )
    return levels


def _stacked(inputs: Any, num_vertices: int) -> tuple[Tensor | None, Array]:
    """The inputs that there are as rows of one tensor, and which vertices have one."""
    if isinstance(inputs, Tensor):
        return inputs, np.ones(num_vertices, dtype=bool)
    has_input = np.fromiter((value is not None for value in inputs), dtype=bool, count=num_vertices)
    given = [value for value in inputs if value is not None]
    if not given:
        return None, has_input
    if isinstance(given[0], Tensor):
        for vertex, value in zip(np.flatnonzero(has_input), given, strict=True):
            if (
                not isinstance(value, Tensor)
                or value.shape != given[0].shape
                or value.dtype != given[0].dtype
            ):
                other = int(np.argmax(has_input))
                raise DataError(
                    f"the input of vertex {vertex} is {_shape(value)}, that of vertex {other} {_shape(given[0])}.",
                    fix="give all vertices inputs of one shape and type.",
                )
        return torch.stack(given), has_input
    try:
        rows = np.asarray(given)
        if rows.dtype.kind == "f":
            return torch.as_tensor(rows, dtype=torch.get_default_dtype()), has_input
        return torch.as_tensor(rows), has_input
    except (ValueError, TypeError) as error:
        odd = next((at for at, value in enumerate(given) if type(value) is not type(given[0])), 0)
        raise DataError(
            f"inputs of vertices cannot be one tensor, such as {given[odd]!r:.60} of vertex "
            f"{np.flatnonzero(has_input)[odd]}: {error}.",
            fix="make them numbers or tensors of one shape, or say how with input=.",
        ) from error


def _shape(value: Any) -> str:
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
