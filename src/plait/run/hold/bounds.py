"""Gradients held to the bounds of a `Clip`.

In: gradients by name of their parameter. Out: the same tensors, smaller where they were too large. Sparse gradients are
bounded by their entries, which must be coalesced.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from plait.job.updates.clip import Clip
from plait.torch_private import foreach

_Of = TypeVar("_Of")


def entries(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Dense tensors to read and write: of sparse gradients, their entries."""
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each."""
    return list(foreach.norm(entries(gradients))) if gradients else []


def by_norm(clip: Clip, gradients: Mapping[str, _Of]) -> dict[int, list[_Of]]:
    """Gradients, or what there is of each, that share a norm, by its position in `clip.norms`."""
    found: dict[int, list[_Of]] = {}
    if clip.norms:
        for name, tensor in gradients.items():
            if (position := clip.norm_of(name)) is not None:
                found.setdefault(position, []).append(tensor)
    return found


def clamp(clip: Clip, gradients: Mapping[str, Tensor]) -> None:
    """As torch.nn.utils.clip_grad_value_."""
    bounds: dict[float, list[Tensor]] = {}
    if clip.values:
        for name, tensor in gradients.items():
            if (bound := clip.value_of(name)) is not None:
                bounds.setdefault(bound, []).append(tensor)
    for bound, tensors in bounds.items():
        foreach.clamp_min_(entries(tensors), -bound)
        foreach.clamp_max_(entries(tensors), bound)
