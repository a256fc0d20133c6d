"""What generated code calls in the place of ops of torch's whose kernels do not suit it.

In: the arguments of the op. Out: the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.torch_private.ops import direct_call

aten = torch.ops.aten
_view = direct_call(aten.view.default)


def view_or_copy(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """A view, or a copy where the kernel before it left other strides than torch's fake kernel had promised.

    `softplus_backward` of a transposed gradient does so in torch 2.13. Nobody writes over what a live view shows: a
    copy is as good.
    """
    try:
        return _view(tensor, size)  # type: ignore[no-any-return]
    except RuntimeError:
        return tensor.reshape(size)


def _room_like(tensor: Tensor) -> Tensor:
    """Memory of its own for a tensor of these strides.

    Torch's kernels of `copy` and of scattering copy all of the memory that a tensor lies in (a message, a flat group of
    parameters), and fail where that is no multiple of an element.
    """
    if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return _room_like(tensor).copy_(source, non_blocking)


def _scattered(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of a tensor in which a view of it has other values."""

    def scatter(tensor: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = _room_like(tensor).copy_(tensor)
        view(made, *args, **kwargs).copy_(source)
        return made

    return scatter


KERNELS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.view.default: view_or_copy,
        aten.copy.default: _copy,
        aten.slice_scatter.default: _scattered(aten.slice.Tensor),
        aten.select_scatter.default: _scattered(aten.select.int),
        aten.diagonal_scatter.default: _scattered(aten.diagonal.default),
    }
)
