"""Gradients held to the bounds of a `Clip`.

In: gradients by name of their parameter. Out: the same tensors, smaller where they were too large. Sparse gradients are
bounded by their entries, which must be coalesced.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from plait.job.updates.clip import Clip
from plait.torch_private import foreach


def entries(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Dense tensors to read and write: of sparse gradients, their entries."""
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]


def by_norm(clip: Clip, gradients: Mapping[str, Tensor]) -> dict[int, list[Tensor]]:
    """Gradients that share a norm, by its position in `clip.norms`."""
    found: dict[int, list[Tensor]] = {}
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
