"""Fake tensors: shapes, dtypes and devices without memory. Private to torch (`torch._subclasses`)."""

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""The logger to which torch writes a traceback of its own for an op that fails on fake tensors."""


def storage_of(tensor: Tensor) -> int:
    """What tensors have in common that share memory, fake ones too."""
    address: int = tensor.untyped_storage()._cdata
    return address


__all__ = ["FAKE_LOGGER", "DataDependentOutputException", "FakeTensor", "FakeTensorMode", "storage_of"]
