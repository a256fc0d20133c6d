"""Fake tensors: shapes, dtypes and devices without memory. Private to torch (`torch._subclasses`)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""The logger to which torch writes a traceback of its own for an op that fails on fake tensors."""


def storage_of(tensor: Tensor) -> int:
    """What tensors have in common that share memory, fake ones too."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """What `copy.deepcopy` makes of a fake tensor.

    Torch 2.13 copies the memory of those that `torch.tensor` made, of which there is none: it writes over the heap.
    """
    if id(tensor) not in memo:
        with torch.no_grad():
            made = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name not in vars(made):  # the user's own
                setattr(made, name, value)
        memo[id(tensor)] = made
    return memo[id(tensor)]  # type: ignore[no-any-return]


FakeTensor.__deepcopy__ = _copied  # type: ignore[method-assign]

__all__ = ["FAKE_LOGGER", "DataDependentOutputException", "FakeTensor", "FakeTensorMode", "storage_of"]
