"""Batches of any nesting, seen as the tensors that enter a graph.

In: two example batches of different sizes. Out: a `BatchLayout` (which leaves are tensors, which count samples on dim
0) and fake leaves for any number of samples. Never reads a value out of the data.
"""

from typing import Any

import torch

from plait.errors import DataError
from plait.graph.graph import BatchLayout
from plait.job.batch import Objects
from plait.torch_private import pytree


def read_layout(first: Any, num_first: int, second: Any, num_second: int) -> BatchLayout:
    """Compare a batch of `num_first` samples with one of `num_second` to find the dims that count samples."""
    leaves_a, spec_a = pytree.tree_flatten(first)
    leaves_b, spec_b = pytree.tree_flatten(second)
    if spec_a != spec_b:
        raise DataError(
            f"two batches have different structures: {spec_a} and {spec_b}.",
            fix="let `collate` return the same keys and nesting for every batch; what one sample has for itself, "
            "such as a tensor of its own length for plait.Batched, goes in a dataclass.",
        )
    has_samples = []
    for a, b in zip(leaves_a, leaves_b, strict=True):
        if isinstance(a, torch.Tensor):
            counts = a.ndim > 0 and a.shape[0] == num_first and b.shape[0] == num_second
            has_samples.append(bool(counts))
    if not any(has_samples) and not any(isinstance(leaf, Objects) for leaf in leaves_a):
        raise DataError(
            "no tensor of the batch has the samples on dim 0: shapes are "
            + ", ".join(str(tuple(leaf.shape)) for leaf in leaves_a if isinstance(leaf, torch.Tensor)),
            fix="let `collate` stack the samples on dim 0.",
        )
    return BatchLayout(
        spec=spec_a,
        is_tensor=tuple(isinstance(leaf, torch.Tensor) for leaf in leaves_a),
        has_samples=tuple(has_samples),
    )


def resize_shapes(
    layout: BatchLayout, tensors: list[torch.Tensor], num_samples: int
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and dtypes of the leaves as they would be with `num_samples` samples."""
    return tuple(
        ((num_samples, *tensor.shape[1:]) if counts else tuple(tensor.shape), tensor.dtype)
        for tensor, counts in zip(tensors, layout.has_samples, strict=True)
    )
