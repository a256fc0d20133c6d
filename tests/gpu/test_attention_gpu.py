"""plait::attention on CUDA: every kernel against float64 on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.graph.ops.attention import attention, attention_backward
from plait.graph.ops.attention_kernels import backward_by, forward_by, kernel_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""A few roundings of each dtype, for values of order 1."""

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FAST = ("flash_cuda", "cudnn")
"""Kernels among which the faster one is taken, shape by shape."""
CASES = [
    # dtype, T, S, D, E, mask, causal, kernel
    (BF16, 64, 64, 32, 32, "none", True, "fastest"),
    (F16, 37, 37, 64, 64, "none", True, "fastest"),
    (BF16, 37, 50, 64, 64, "none", False, "fastest"),
    (BF16, 37, 50, 64, 64, "none", True, "efficient"),
    (BF16, 37, 37, 64, 64, "bool", False, "efficient"),
    (BF16, 37, 37, 64, 32, "none", True, "efficient"),
    (BF16, 37, 37, 12, 12, "none", True, "math"),
    (F32, 64, 64, 32, 32, "none", True, "efficient"),
    (F32, 37, 50, 32, 32, "none", True, "efficient"),
    (F32, 50, 37, 32, 32, "none", True, "efficient"),
    (F32, 37, 50, 32, 32, "bool", False, "efficient"),
    (F32, 37, 50, 32, 32, "padding", False, "efficient"),
    (F32, 37, 50, 32, 32, "float", False, "efficient"),
    (F32, 37, 50, 16, 8, "float", False, "efficient"),
    (F32, 5, 7, 6, 6, "bool", False, "math"),
    (F64, 37, 50, 32, 32, "float", False, "math"),
    (F32, 1, 1, 8, 8, "none", False, "efficient"),
]


def mask_of(kind: str, batch: int, length: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "float":
        return torch.randn(1, 1, length, keys, dtype=dtype)
    mask = torch.rand(batch, 1, 1 if kind == "padding" else length, keys) > 0.3
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_is_close_to_cpu_float64(case: tuple[Any, ...]) -> None:
    dtype, length, keys, dim, value_dim, kind, causal, kernel = case
    shapes = ((length, dim), (keys, dim), (keys, value_dim), (length, value_dim))
    q, k, v, grad = (torch.randn(2, size, 3, width, dtype=dtype).transpose(1, 2) for size, width in shapes)
    mask = mask_of(kind, 2, length, keys, dtype)
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    out, lse = attention(q.double(), k.double(), v.double(), wide_mask, causal, 0.3)
    grads = attention_backward(
        grad.double(), q.double(), k.double(), v.double(), out, lse, wide_mask, causal, 0.3
    )

    q, k, v, grad = (x.cuda() for x in (q, k, v, grad))
    mask = None if mask is None else mask.cuda()
    possible = FAST if kernel == "fastest" else (kernel,)
    assert kernel_for(q, k, v, mask, causal) in possible
    for one in possible:
        actual, actual_lse = forward_by(one, q, k, v, mask, causal, 0.3)
        assert actual_lse.shape == lse.shape
        assert actual_lse.is_contiguous()
        actual_grads = backward_by(one, grad, q, k, v, actual, actual_lse, mask, causal, 0.3)
        for left, right in zip((actual, *actual_grads), (out, *grads), strict=True):
            assert left.dtype == dtype
            assert left.transpose(1, 2).is_contiguous()
            scale = max(1.0, float(right.abs().max()))
            torch.testing.assert_close(left.cpu().double(), right, rtol=0, atol=TOLERANCE[dtype] * scale)
        torch.testing.assert_close(actual_lse.cpu().double(), lse, rtol=0, atol=TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_gradient_that_is_expanded(dtype: torch.dtype) -> None:
    """`out.sum()` hands back a gradient without memory of its own."""
    q = torch.randn(2, 3, 40, 32, dtype=dtype, device="cuda", requires_grad=True)
    out, _ = torch.ops.plait.attention(q, q, q, None, True, 0.3)
    (expanded,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (dense,) = torch.autograd.grad(out, q, torch.ones_like(out))
    torch.testing.assert_close(expanded, dense)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_empty_batch(dtype: torch.dtype) -> None:
    q = torch.randn(0, 3, 5, 8, dtype=dtype, device="cuda")
    out, lse = attention(q, q, q, None, True, 0.3)
    assert out.shape == q.shape
    assert [x.shape for x in attention_backward(out, q, q, q, out, lse, None, True, 0.3)] == [q.shape] * 3


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_query_that_sees_nothing_harms_nobody(dtype: torch.dtype) -> None:
    q, k, v, grad = (torch.randn(2, 3, 16, 16, dtype=dtype, device="cuda") for _ in range(4))
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="cuda")
    mask[0, 0, 3] = False
    out, lse = attention(q, k, v, mask, False, 0.3)
    grads = attention_backward(grad, q, k, v, out, lse, mask, False, 0.3)
    assert not out[0, :, 3].any()
    assert all(bool(x.isfinite().all()) for x in grads)
