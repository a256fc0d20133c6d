"""Torch functions in other words: their own way asks for values, or for memory that no plan can cut.

In: a call that the user's model makes while it is traced. Out: the same numbers, by plain ops.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _cov(
    func: Callable[..., Tensor],
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """The covariance of rows; torch's own asks a tensor whether there are samples enough."""
    if fweights is not None or aweights is not None or x.ndim > 2:
        return func(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    centered = rows - rows.mean(1, keepdim=True)
    return (centered @ centered.mH / max(rows.shape[1] - correction, 0)).squeeze()


def _corrcoef(func: Callable[..., Tensor], x: Tensor) -> Tensor:
    if x.ndim != 2 or x.is_complex():
        return func(x)
    found = _cov(func, x)
    if found.ndim == 0:
        return found / found
    deviation = found.diag().sqrt()
    return (found / deviation[:, None] / deviation).clip(-1, 1)


def _averaged(func: Callable[..., Tensor], x: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
    """The mean of every channel; torch's own lays it out as the input is, by strides, in which samples are lost."""
    dims = 2 if func is F.adaptive_avg_pool2d else 3
    if output_size != 1 and tuple(output_size if isinstance(output_size, Sequence) else ()) != (1,) * dims:
        return func(x, output_size)
    return x.mean(tuple(range(-dims, 0)), keepdim=True)


def _set_item(func: Callable[..., Any], x: Tensor, index: Any, value: Any) -> Any:
    """`x[mask] = value` of one value for all places: its gradient by torch asks how many there are."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not isinstance(value, Tensor):
        return func(x, index, value)
    own = x.shape[index.ndim :]
    while value.ndim > len(own) and value.shape[0] == 1:
        value = value[0]
    fits = value.ndim <= len(own) and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(value.shape), reversed(own), strict=False)
    )
    if not value.requires_grad or not fits or value.dtype != x.dtype or index.shape != x.shape[: index.ndim]:
        return func(x, index, value)
    x.copy_(torch.where(index.view(*index.shape, *(1 for _ in own)), value, x))
    return None


PLAIN_FORMS: Mapping[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    Tensor.cov: _cov,
    Tensor.__setitem__: _set_item,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    F.adaptive_avg_pool2d: _averaged,
    F.adaptive_avg_pool3d: _averaged,
}
"""By function: what is called with it and its arguments."""
