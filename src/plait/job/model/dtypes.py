"""Which floating dtypes a run computes in: those that the user made, unless float64 is asked for.

In: a model's tensors, the dtype of a run (float64 for verification, else float32). Out: dtypes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def scalar_dtype(parameters: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """What totals, weights and tangents are kept in: nothing shorter than float32, float64 beside float64 weights."""
    wide = dtype == torch.float64 or any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    return torch.float64 if wide else torch.float32


def wide(dtype: torch.dtype) -> torch.dtype:
    """The widest of its kind."""
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


def leaf_dtype(leaf: torch.dtype, dtype: torch.dtype, narrow: bool) -> torch.dtype:
    """What a tensor of a batch is given to the model as; `narrow`: float64 data for a model that cannot take it."""
    if leaf.is_floating_point and dtype == torch.float64:
        return torch.float64
    return torch.float32 if narrow and leaf == torch.float64 else leaf


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that code makes without a dtype follow a run in float64; other runs leave torch's default alone."""
    before = torch.get_default_dtype()
    if dtype == torch.float64:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
