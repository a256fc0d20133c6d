"""Several tensors in one message, and back.

In: tensors and what the program says of their shapes, dtypes and strides; it is the same on both sides. Out: one flat
tensor of bytes, or views into one. Tensors that are dense in memory keep their strides, so that the receiver's graph
may view them as the sender's did.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.program.program import Spec

_ALIGNMENT = 64
"""Values in a packed message start at a cache line, as torch's own allocator has it."""


def pack(tensors: Sequence[Tensor], values: Sequence[Spec]) -> Tensor:
    """All tensors as one message."""
    if len(tensors) == 1 and tensors[0].is_contiguous() and _strides(values[0]) == tensors[0].stride():
        return tensors[0].reshape(-1).view(torch.uint8)
    flat = room(values, tensors[0].device)
    for tensor, view in zip(tensors, unpack(flat, values), strict=True):
        view.copy_(tensor)
    return flat


def room(values: Sequence[Spec], device: torch.device) -> Tensor:
    """Memory for a message."""
    size = sum(_padded(value) for value in values[:-1]) + values[-1].num_bytes
    return torch.empty(size, dtype=torch.uint8, device=device)


def unpack(flat: Tensor, values: Sequence[Spec]) -> list[Tensor]:
    """The tensors of a message, as views."""
    found, start = [], 0
    for value in values:
        part = flat[start : start + value.num_bytes].view(value.dtype)
        found.append(part.as_strided(value.shape, _strides(value), part.storage_offset()))
        start += _padded(value)
    return found


def _padded(value: Spec) -> int:
    return -(-value.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _strides(value: Spec) -> tuple[int, ...]:
    """The value's own strides where it fills its memory, else those of a contiguous tensor."""
    count = 1
    for extent in value.shape:
        count *= extent
    spanned = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=False))
    if len(value.strides) == len(value.shape) and count and spanned == count and _is_permuted(value):
        return value.strides
    strides, step = [], 1
    for extent in reversed(value.shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _is_permuted(value: Spec) -> bool:
    """Whether each element has a place of its own."""
    step = 1
    for stride, extent in sorted((s, n) for n, s in zip(value.shape, value.strides, strict=True) if n != 1):
        if stride != step:
            return False
        step *= extent
    return True
