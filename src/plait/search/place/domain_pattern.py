"""Which tensors of the batch are cut along `domain`, and on which dim.

In: a graph, the size of the axis, the plan's `domain.dim`. Out: (tensor, placement) entries. Images are cut by rows
(dim 2 of [N, C, H, W] and of volumes), sequences by positions (dim 1 of tokens [N, T] and features [N, T, C]), and what
belongs to them position by position (labels, masks) like them. It never looks at the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.plan.placements import Entries


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of the batch that has samples on dim 0."""

    name: str
    shape: tuple[int, ...]
    is_float: bool


def domain_batch(graph: Graph, size: int, dim: int | None) -> Entries:
    """The entries of the batch's tensors that are cut over `size` ranks; `dim` is the plan's own choice."""
    nodes = graph.nodes()
    leaves = []
    for entry, counts in zip(graph.inputs_of("batch"), graph.batch.has_samples, strict=True):
        value: torch.Tensor = nodes[entry.node].meta["val"]
        if counts:
            leaves.append(_Leaf(entry.name, tuple(map(int, value.shape)), value.is_floating_point()))
    cut = _by_kind(leaves) if dim is None else _by_dim(leaves, dim)
    shapes = ", ".join(f"{leaf.name} {list(leaf.shape)}" for leaf in leaves)
    if not cut:
        raise PlanError(
            f"axis domain={size}: nothing of the batch can be cut"
            + (f" on dim {dim}" if dim is not None else "")
            + f": it has {shapes}.",
            fix=f"set domain.dim to the dim of rows or positions, or use data={size}.",
        )
    for leaf, cut_dim in cut:
        if leaf.shape[cut_dim] % size:
            raise PlanError(
                f"axis domain={size}: dim {cut_dim} of {leaf.name} {list(leaf.shape)} has {leaf.shape[cut_dim]}, "
                f"which {size} does not divide.",
                fix=f"pad it to {-(-leaf.shape[cut_dim] // size) * size}, or choose a size that divides it.",
            )
    return tuple((leaf.name, f"S({cut_dim})") for leaf, cut_dim in cut)


def _by_kind(leaves: Sequence[_Leaf]) -> list[tuple[_Leaf, int]]:
    found = {leaf: cut_dim for leaf in leaves if (cut_dim := _own_dim(leaf)) is not None}
    extents = {leaf.shape[cut_dim] for leaf, cut_dim in found.items()}
    for leaf in leaves:
        if leaf not in found and len(leaf.shape) > 1 and leaf.shape[1] in extents:
            found[leaf] = 1
    return list(found.items())


def _own_dim(leaf: _Leaf) -> int | None:
    if leaf.is_float:
        return 2 if len(leaf.shape) > 3 else 1 if len(leaf.shape) == 3 else None
    return 1 if len(leaf.shape) == 2 else None


def _by_dim(leaves: Sequence[_Leaf], dim: int) -> list[tuple[_Leaf, int]]:
    """The largest tensor on its `dim`, and all others that have as many there."""
    able = [leaf for leaf in leaves if len(leaf.shape) > dim]
    if not able:
        return []
    largest = max(able, key=lambda leaf: torch.Size(leaf.shape).numel())
    return [(leaf, dim) for leaf in able if leaf.shape[dim] == largest.shape[dim]]
