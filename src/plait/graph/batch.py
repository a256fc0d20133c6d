"""Batches of any nesting, seen as the tensors that enter a graph.

In: two example batches of different sizes. Out: a `BatchLayout` (which leaves are tensors, which count samples on dim
0) and fake leaves for any number of samples. Never reads a value out of the data.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.errors import DataError
from plait.graph.capture.capture import LeafShapes
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
    _refuse_nested(leaves_a)
    has_samples = []
    for a, b in zip(leaves_a, leaves_b, strict=True):
        if isinstance(a, torch.Tensor):
            counts = a.ndim > 0 and a.shape[0] == num_first and b.shape[0] == num_second
            has_samples.append(bool(counts))
    _refuse_no_samples(has_samples, leaves_a)
    return BatchLayout(
        spec=spec_a,
        is_tensor=tuple(isinstance(leaf, torch.Tensor) for leaf in leaves_a),
        has_samples=tuple(has_samples),
    )


def _refuse_nested(leaves: Iterable[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise DataError(
                f"the batch holds a nested tensor of {leaf.size(0)} samples, whose lengths are no shape.",
                fix="let `collate` return a list of the samples' tensors and make the nested tensor of it in the model "
                "(torch.nested.as_nested_tensor), which then runs eagerly; or pad them.",
            )


def _refuse_no_samples(has_samples: Iterable[bool], leaves: Iterable[Any]) -> None:
    if not any(has_samples) and not any(isinstance(leaf, Objects) for leaf in leaves):
        raise DataError(
            "no tensor of the batch has the samples on dim 0: shapes are "
            + ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)),
            fix="let `collate` stack the samples on dim 0.",
        )


def confirmed(layout: BatchLayout, example: Any, seen: Iterable[tuple[int, LeafShapes]]) -> BatchLayout:
    """The layout without dims that only seemed to count samples: `seen` says for numbers of samples which shapes came.

    What one sample has one of, such as its only box, looks like a sample where batches are made of it.
    """
    counts = list(layout.has_samples)
    for number, shapes in seen:
        counts = [old and shape[0] == number for old, (shape, _) in zip(counts, shapes, strict=True)]
    _refuse_no_samples(counts, pytree.tree_leaves(example))
    return replace(layout, has_samples=tuple(counts))


def check_samples(layout: BatchLayout, batch: Any, ids: Sequence[int]) -> None:
    """Raise DataError where a dim counts something else than these samples after all."""
    number = len(ids)
    for at, (tensor, counts) in enumerate(zip(layout.tensors(batch), layout.has_samples, strict=True)):
        if counts and tensor.shape[0] != number:
            raise DataError(
                f"tensor {at} of a batch of {number} samples has the shape {tuple(tensor.shape)}; dim 0 was the number "
                f"of samples in all batches that were looked at before the run. (Samples {', '.join(map(str, ids[:8]))}"
                f"{', ...' if number > 8 else ''})",
                fix="let `collate` give it another first dim (unsqueeze(0)), so that it is not taken for samples.",
            )


def resize_shapes(layout: BatchLayout, tensors: list[torch.Tensor], num_samples: int) -> LeafShapes:
    """Shapes and dtypes of the leaves as they would be with `num_samples` samples."""
    return resized(layout, tuple((tuple(t.shape), t.dtype) for t in tensors), num_samples)


def resized(layout: BatchLayout, shapes: LeafShapes, num_samples: int) -> LeafShapes:
    """The same for shapes that are known."""
    return tuple(
        ((num_samples, *shape[1:]) if counts else shape, dtype)
        for (shape, dtype), counts in zip(shapes, layout.has_samples, strict=True)
    )
