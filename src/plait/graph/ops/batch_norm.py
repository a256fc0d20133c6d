"""Batch normalization in training mode as one functional op that every plan can partition.

In: a batch and the running statistics. Out: the normalized batch, the statistics used, and the new running statistics;
nothing is written in place. On one rank the fused kernel of torch runs; where the batch is split, `program/` replaces
the op by statistics over all ranks and `normalize`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("plait::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(output, batch mean, inverse deviation, new running mean, new running variance)."""
    return run_batch_norm(x, weight, bias, mean, var, momentum, eps)


@batch_norm.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    stat = mean.new_empty(x.shape[1])
    output = torch.empty_like(x, memory_format=memory_format_of(x))
    return output, stat, torch.empty_like(stat), torch.empty_like(mean), torch.empty_like(var)


@torch.library.custom_op("plait::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to the input, the weight and the bias."""
    return run_batch_norm_backward(grad, x, weight, mean, invstd, eps)


@batch_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=memory_format_of(x))
    return grad_x, torch.empty_like(mean), torch.empty_like(mean)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _, _, eps = inputs
    ctx.has_weight, ctx.has_bias, ctx.eps = weight is not None, bias is not None, eps
    ctx.save_for_backward(x, weight, output[1], output[2])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, mean, invstd = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = batch_norm_backward(grad, x, weight, mean, invstd, ctx.eps)
    return (
        grad_x,
        grad_weight.to(weight.dtype) if ctx.has_weight else None,
        grad_bias.to(weight.dtype) if ctx.has_bias else None,
        None,
        None,
        None,
        None,
    )


batch_norm.register_autograd(_differentiate, setup_context=_remember)


def run_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op on real tensors, all samples at hand."""
    new_mean, new_var = mean.clone(), var.clone()
    if _suits_cudnn(x, weight, bias):
        output, batch_mean, invstd, _ = aten.cudnn_batch_norm.default(
            x, weight, bias, new_mean, new_var, True, momentum, eps
        )
        return output, batch_mean, invstd, new_mean, new_var
    output, batch_mean, invstd = aten.native_batch_norm.default(
        x, weight, bias, new_mean, new_var, True, momentum, eps
    )
    return output.contiguous(memory_format=memory_format_of(x)), batch_mean, invstd, new_mean, new_var


def run_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient on real tensors, all samples at hand."""
    if _suits_cudnn(x, weight, weight):
        # Contiguous input runs in cuDNN's spatial mode, which keeps nothing in reserve.
        grads: tuple[Tensor, Tensor, Tensor] = aten.cudnn_batch_norm_backward.default(
            x, grad.contiguous(), weight, None, None, mean, invstd, eps, x.new_empty(0, dtype=torch.uint8)
        )
        return grads
    grad_x, grad_weight, grad_bias = aten.native_batch_norm_backward.default(
        grad, x, weight, None, None, mean, invstd, True, eps, [True, weight is not None, weight is not None]
    )
    if grad_weight is None:
        grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
    return grad_x.contiguous(memory_format=memory_format_of(x)), grad_weight, grad_bias


def memory_format_of(x: Tensor) -> torch.memory_format:
    """How the output lies in memory; torch's kernels differ where the input is a transposed view, say."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.ndim)
    is_last = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if last is not None and is_last else torch.contiguous_format


def _suits_cudnn(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Where eager torch takes cuDNN too, and its kernel keeps no reserve that the backward would need."""
    return (
        x.is_cuda
        and torch.backends.cudnn.enabled
        and weight is not None
        and bias is not None
        and x.dtype == torch.float32
        and x.ndim in (4, 5)
        and 0 < x.shape[0] <= _CUDNN_BATCH_LIMIT
        and x.is_contiguous()
    )


def plain_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op in ops that a compiler knows, so that it can fuse them with what stands around them."""
    output, batch_mean, invstd, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, var, True, momentum, eps
    )
    return output, batch_mean.to(mean.dtype), invstd.to(mean.dtype), new_mean, new_var


def plain_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient in ops that a compiler knows."""
    mask = [True, weight is not None, weight is not None]
    grad_x, grad_weight, grad_bias = aten.native_batch_norm_backward.default(
        grad, x, weight, None, None, mean, invstd, True, eps, mask
    )
    if grad_weight is None:
        grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
    return grad_x, grad_weight.to(mean.dtype), grad_bias.to(mean.dtype)


_CUDNN_BATCH_LIMIT = 880_801
"""Torch's own bound on the batch for cuDNN's batch norm."""

IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.batch_norm.default: run_batch_norm,
        torch.ops.plait.batch_norm_backward.default: run_batch_norm_backward,
    }
)

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.batch_norm.default: plain_batch_norm,
        torch.ops.plait.batch_norm_backward.default: plain_batch_norm_backward,
    }
)
"""What compiled segments compute in the place of the ops."""
