"""How tensors lie in one piece of memory, on a device or on the host.

In: tensors, by a key. Out: where each goes, so that those that share memory still do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 256
"""Bytes: where tensors begin in the memory of their parcel."""
Key = object
"""Anything that can be the key of a dict."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in the memory of its parcel."""

    offset: int
    """In bytes."""
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in some memory of the parcel."""
        start = (flat.storage_offset() + self.offset) // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=flat.device)
        return made.set_(flat.untyped_storage(), start, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Slots:
    """How tensors lie in the memory of their parcel: as they lay before, so that those that share memory still do."""

    of: dict[Key, Slot]
    size: int
    """In bytes."""
    copied: tuple[Key, ...]
    """Tensors with which all of it is copied: the others show parts of these."""


def slots_of(tensors: Mapping[Key, Tensor]) -> Slots:
    """Room for tensors, one after the other; those that show parts of another's memory lie in its room."""
    spans = {key: _span(tensor) for key, tensor in tensors.items()}
    owners = {
        key: max(_around(span, spans), key=lambda k: spans[k][1] - spans[k][0]) for key, span in spans.items()
    }
    places: dict[Key, int] = {}
    size = 0
    for owner in dict.fromkeys(owners.values()):
        start, end = spans[owner]
        places[owner] = size
        size += -(-(end - start) // _ALIGNMENT) * _ALIGNMENT
    return Slots(
        {
            key: Slot(
                places[owners[key]] + spans[key][0] - spans[owners[key]][0],
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            for key, tensor in tensors.items()
        },
        size,
        tuple(places),
    )


def _around(span: tuple[int, int], spans: Mapping[Key, tuple[int, int]]) -> list[Key]:
    return [key for key, (start, end) in spans.items() if start <= span[0] and span[1] <= end]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where the memory that a tensor shows begins and ends."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def bytes_of(tensor: Tensor) -> Tensor:
    """All memory between the first and the last element."""
    start, end = _span(tensor)
    first = tensor.storage_offset() * tensor.element_size()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage(), first, (end - start,), (1,))
