"""GELU for compilers of GPUs, in fewer instructions than `erf` has, of 16-bit tensors.

In: what `aten.gelu` and its backward take. Out: the same numbers up to the rounding of 16 bits. With `erf` the kernels
wait for arithmetic, not for memory: it has some thirty instructions, and the backward an exponential besides. Here both
come from one exponential, by Abramowitz and Stegun, 7.1.26: the error is below 1e-7.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_SHORT = (torch.bfloat16, torch.float16)
_P = 0.3275911 / math.sqrt(2)
_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun, 7.1.26: p, of the root of 2, and a5 to a1."""
_HALF_BIT = -0.5 / math.log(2)
_DENSITY = 1 / math.sqrt(2 * math.pi)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal distribution up to x, and exp(-x^2 / 2); roots and powers of two are one instruction of a GPU each."""
    y = x.abs() * _P + 1
    t = (y * y).rsqrt()  # 1 / y
    bell = (x * x * _HALF_BIT).exp2()
    tail = t * _COEFFICIENTS[0]
    for coefficient in _COEFFICIENTS[1:]:
        tail = (tail + coefficient) * t
    tail = tail * bell * 0.5  # beyond |x|
    return torch.where(x < 0, tail, 1 - tail), bell


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    if approximate != "none" or x.dtype not in _SHORT:
        return NotImplemented
    wide = x.float()
    return (wide * _normal(wide)[0]).to(x.dtype)


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Any:
    if approximate != "none" or x.dtype not in _SHORT or grad.dtype != x.dtype:
        return NotImplemented
    wide = x.float()
    below, bell = _normal(wide)
    return (grad.float() * (below + wide * bell * _DENSITY)).to(x.dtype)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {aten.gelu.default: _gelu, aten.gelu_backward.default: _gelu_backward}
)
"""What a compiler is given; they return NotImplemented where torch's own is as good."""
