"""Gradients and the sums of their columns, which are gradients of biases, by one reading of memory.

In: what the backward of a GELU or a layer norm takes, or gradients of heads, which it puts beside one another. Out: the
result in 16 bits, with the gradient that arrives beside a norm already added, and sums in float32. A compiler reads the
result once more for each sum, and a layer norm's once more to round it. On processors, which nobody compiles such
graphs for, the same is computed by torch.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
FEWEST_COLUMNS = 512
"""With fewer a program has too little to do at a time; a compiler's kernels are as good."""
MOST_COLUMNS = 8192
"""Of a layer norm: a row lies in the registers of one program."""


@cache
def _kernels() -> ModuleType | None:
    """None where this machine cannot build them."""
    try:
        from plait.graph.ops import summed_kernels as kernels

        one = torch.ones(2, 16, dtype=torch.bfloat16, device="cuda")
        wide = one.float()
        kernels.gelu_gradient(one, one)
        kernels.heads_beside([one.view(1, 1, 2, 16)] * 3)
        kernels.norm_gradient(one, wide, wide[:, 0], wide[:, 0], wide[0], wide, torch.float32, torch.bfloat16)
    except Exception:  # no Triton, no C compiler, a device that it does not know
        return None
    return kernels


def has_kernels() -> bool:
    """Whether this machine gains by them."""
    return _kernels() is not None


def _gelu_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    if grad.is_cuda:
        kernels = _kernels()
        assert kernels is not None
        return kernels.gelu_gradient(grad, x)  # type: ignore[no-any-return]
    made = aten.gelu_backward(grad.float(), x.float()).to(grad.dtype)
    return made, made.float().sum(0)


def _norm_gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    added: Tensor | None,
    dtype: torch.dtype,
    short: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    if grad.is_cuda:
        kernels = _kernels()
        assert kernels is not None
        return kernels.norm_gradient(grad, x, mean, rstd, weight, added, dtype, short)  # type: ignore[no-any-return]
    incoming, scaled = grad.float(), (x.float() - mean[:, None]) * rstd[:, None]
    inner = incoming if weight is None else incoming * weight.float()
    share = (inner * scaled).mean(1, keepdim=True)
    made = (inner - inner.mean(1, keepdim=True) - scaled * share) * rstd[:, None]
    total = (made if added is None else made + added.float()).to(dtype)
    rounded = total.to(short)
    sums = torch.stack(((incoming * scaled).sum(0), incoming.sum(0), rounded.float().sum(0)))
    return total, (rounded if short != dtype else total.new_empty(0, dtype=short)), sums


def _heads_beside(sources: list[Tensor]) -> tuple[Tensor, Tensor]:
    if sources[0].is_cuda:
        kernels = _kernels()
        assert kernels is not None
        return kernels.heads_beside(sources)  # type: ignore[no-any-return]
    made = torch.stack(sources).permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1).contiguous()
    return made, made.float().sum(0)


def _like_heads(sources: list[Tensor]) -> tuple[Tensor, Tensor]:
    samples, heads, places, entries = sources[0].shape
    columns = len(sources) * heads * entries
    first = sources[0]
    return first.new_empty((samples * places, columns)), first.new_empty(columns, dtype=torch.float32)


def _register() -> tuple[Any, Any, Any]:
    if not hasattr(torch.ops.plait, "gelu_gradient"):
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        torch.library.define("plait::gelu_gradient", "(Tensor grad, Tensor x) -> (Tensor, Tensor)", tags=tags)
        torch.library.define(
            "plait::norm_gradient",
            "(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? added, ScalarType dtype, "
            "ScalarType short) -> (Tensor, Tensor, Tensor)",
            tags=tags,
        )
        torch.library.define("plait::heads_beside", "(Tensor[] sources) -> (Tensor, Tensor)", tags=tags)
        torch.library.impl("plait::gelu_gradient", ("cpu", "cuda"), _gelu_gradient)
        torch.library.impl("plait::heads_beside", ("cpu", "cuda"), _heads_beside)
        torch.library.register_fake("plait::heads_beside", _like_heads)
        torch.library.impl("plait::norm_gradient", ("cpu", "cuda"), _norm_gradient)
        torch.library.register_fake(
            "plait::gelu_gradient",
            lambda grad, x: (grad.new_empty(grad.shape), grad.new_empty(grad.shape[1], dtype=torch.float32)),
        )
        torch.library.register_fake("plait::norm_gradient", _like_norm_gradient)
    ours = torch.ops.plait
    return ours.gelu_gradient.default, ours.norm_gradient.default, ours.heads_beside.default


def _like_norm_gradient(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Any, added: Any, dtype: Any, short: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums = x.new_empty((3, x.shape[1]), dtype=torch.float32)
    rounded = x.new_empty(x.shape if short != dtype else (0,), dtype=short)
    return x.new_empty(x.shape, dtype=dtype), rounded, sums


GELU_GRADIENT: Any
"""(gradient, sums of its columns) of a GELU by `erf`, of matrices in 16 bits."""
NORM_GRADIENT: Any
"""(gradient of what a layer norm took and `added`, the same as `short` unless it is that already, [gradient of the
weight, gradient of the bias, sums of the columns of the second]), of matrices, computed in float32."""
HEADS_BESIDE: Any
"""([sample and place, which and head and entry], sums of its columns) of gradients [sample, head, place, entry]."""
GELU_GRADIENT, NORM_GRADIENT, HEADS_BESIDE = _register()
