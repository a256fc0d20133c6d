"""Products of groups of rows with a matrix each, as mixtures of experts compute them, as ops that can be captured.

In: rows, one matrix a group, where each group ends. Out: as many rows; rows after the last group are zero. Torch's
own op (`torch.nn.functional.grouped_mm`) takes float32 on processors, but not on fake tensors, and has rules for
strides.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("plait::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[S, K] and [G, K, N] give [S, N]."""
    return run_grouped_product(rows, matrices, ends)


@grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@torch.library.custom_op("plait::grouped_outer", mutates_args=())
def grouped_outer(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """[S, K] and [S, N] give [G, K, N]: the sum over the rows of each group."""
    return run_grouped_outer(rows, others, ends)


@grouped_outer.register_fake
def _(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], others.shape[1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, matrices, ends = ctx.saved_tensors
    needs_rows, needs_matrices, _ = ctx.needs_input_grad
    return (
        grouped_product(grad, matrices.transpose(1, 2), ends) if needs_rows else None,
        grouped_outer(rows, grad, ends) if needs_matrices else None,
        None,
    )


def _differentiate_outer(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, others, ends = ctx.saved_tensors
    needs_rows, needs_others, _ = ctx.needs_input_grad
    return (
        grouped_product(others, grad.transpose(1, 2), ends) if needs_rows else None,
        grouped_product(rows, grad, ends) if needs_others else None,
        None,
    )


grouped_product.register_autograd(_differentiate, setup_context=_remember)
grouped_outer.register_autograd(_differentiate_outer, setup_context=_remember)


def suits_grouped_op(
    rows: Tensor, matrices: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> bool:
    """Whether a call of torch's op is a grouped product: groups of rows, a matrix each."""
    return rows.ndim == 2 and matrices.ndim == 3 and offs is not None and bias is None and out_dtype is None


def run_grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The op on real tensors; torch's kernel on a GPU."""
    if rows.is_cuda:
        return F.grouped_mm(rows, matrices, offs=ends)
    output = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, (start, end) in enumerate(_bounds(ends)):
        torch.mm(rows[start:end], matrices[group], out=output[start:end])
    return output


def run_grouped_outer(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """Its gradient with respect to the matrices, on real tensors."""
    if rows.is_cuda:
        return F.grouped_mm(rows.t(), others, offs=ends)
    output = rows.new_zeros(ends.shape[0], rows.shape[1], others.shape[1])
    for group, (start, end) in enumerate(_bounds(ends)):
        torch.mm(rows[start:end].t(), others[start:end], out=output[group])
    return output


def _bounds(ends: Tensor) -> Iterator[tuple[int, int]]:
    start = 0
    for end in ends.tolist():
        yield start, max(start, end)
        start = max(start, end)


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.grouped_product.default: run_grouped_product,
        torch.ops.plait.grouped_outer.default: run_grouped_outer,
    }
)
