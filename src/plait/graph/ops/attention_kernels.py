"""The kernels behind `plait::attention`: which one runs, and how each wants its arguments.

In: real tensors on a CPU or a CUDA device, as described in `attention_op`. Out: attention and its gradients, in
the same layout from every kernel. It never runs on fake tensors and never draws random numbers. The kernels are torch's
(`torch_private.attention`).
"""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.torch_private import attention as kernels

_LSE_MULTIPLE = 32
"""The efficient kernel's backward reads the logsumexp in blocks of this many queries."""
_MASK_MULTIPLE = 16
"""The efficient kernel reads a mask's rows in vectors: each must start at a multiple of this many elements."""

_TRIALS = 4
"""Times that a kernel is tried; the first ones load it and find its plan."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + mask) v, and the logsumexp that the backward needs."""
    k, v = _repeated(k, q), _repeated(v, q)
    return forward_by(kernel_for(q, k, v, mask, causal), q, k, v, mask, causal, scale)


def forward_by(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if kernel == "flash_cpu":
        bias = _bias(mask, q.dtype)
        out, lse = kernels.flash_cpu(_rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "flash_cuda":
        out, lse = kernels.flash_cuda(_rows(q), _rows(k), _rows(v), 0.0, causal, scale=scale)[:2]
    elif kernel == "cudnn":
        out, lse = kernels.cudnn(_rows(q), _rows(k), _rows(v), None, True, 0.0, causal, scale=scale)[:2]
        lse = lse.view(q.shape[:3])
    elif kernel == "efficient":
        out, lse = kernels.efficient(
            _rows(q), _rows(k), _rows(v), _aligned_bias(mask, q, k), True, 0.0, causal, scale=scale
        )[:2]
        lse = lse[..., : q.shape[2]]
    else:
        out, lse = _math(q, k, v, mask, causal, scale)
    return _heads_inside(out), lse.contiguous()


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, of the last two for every head of q."""
    k, v = _repeated(k, q), _repeated(v, q)
    return backward_by(kernel_for(q, k, v, mask, causal), grad, q, k, v, out, lse, mask, causal, scale)


def backward_by(
    kernel: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (_heads_inside(grad), _rows(q), _rows(k), _rows(v), out)
    if kernel == "flash_cpu":
        bias = _bias(mask, q.dtype)
        grads = kernels.flash_cpu_backward(*inputs, lse, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "flash_cuda":
        # Without dropout the generator's state is not read; these have the types that the forward returns.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = kernels.flash_cuda_backward(*inputs, lse, *lengths, 0.0, causal, state, unused, scale=scale)
    elif kernel == "cudnn":
        unused = torch.empty(
            (), dtype=torch.int64, device=q.device
        )  # without dropout no generator's state is read
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = kernels.cudnn_backward(
            *inputs, lse.unsqueeze(-1), unused, unused, None, *lengths, 0.0, causal, scale=scale
        )
    elif kernel == "efficient":
        # A query that sees no key has -inf here and in its scores: +inf gives it weights of 0 instead of NaN.
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        padded = F.pad(lse, (0, -lse.shape[2] % _LSE_MULTIPLE), value=math.inf)
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        bias = _aligned_bias(mask, q, k)
        grads = kernels.efficient_backward(
            inputs[0],
            *inputs[1:4],
            bias,
            out,
            padded,
            state,
            state,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )[:3]
    else:
        grads = _math_backward(grad, q, k, v, out, lse, mask, causal, scale)
    return _heads_inside(grads[0]), _heads_inside(grads[1]), _heads_inside(grads[2])


def kernel_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str:
    """Which kernel runs, the same for a forward and its backward: the fastest of those that can, timed once a shape."""
    if not (q.numel() and k.numel() and v.numel()):
        return "math"
    if q.device.type == "cpu":
        return "flash_cpu" if q.shape[-1] == v.shape[-1] else "math"
    if q.device.type != "cuda" or q.dtype == torch.float64:
        return "math"
    half = q.dtype in (torch.float16, torch.bfloat16)
    dims = (q.shape[-1], v.shape[-1])
    efficient = "efficient" if all(dim % (8 if half else 4) == 0 for dim in dims) else "math"
    # Flash and cuDNN count causal from the last key, which differs from ours unless the lengths are equal.
    square = not causal or q.shape[2] == k.shape[2]
    if not (half and mask is None and square and dims[0] == dims[1] <= 256 and dims[0] % 8 == 0):
        return efficient
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return efficient
    return _fastest(
        q.device, q.dtype, tuple(q.shape), tuple(k.shape), _strides(q), _strides(k), _strides(v), causal
    )


def _strides(x: Tensor) -> tuple[int, ...]:
    return _rows(x).stride()


@cache
def _fastest(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    strides: tuple[int, ...],
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    causal: bool,
) -> str:
    """The kernel whose forward and backward together take least time on tensors like these."""
    if torch.cuda.is_current_stream_capturing():
        return "flash_cuda"
    best, found = math.inf, "flash_cuda"
    for kernel in ("flash_cuda", "cudnn"):
        try:
            q, k, v = (
                torch.empty_strided(extent, stride, dtype=dtype, device=device).fill_(0.01)
                for extent, stride in ((shape, strides), (key_shape, key_strides), (key_shape, value_strides))
            )
            taken = _seconds(kernel, q, k, v, causal)
        except (RuntimeError, AttributeError):
            continue  # not built in, not for these shapes, or no memory to try it
        if taken < best:
            best, found = taken, kernel
    return found


def _seconds(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """How long a forward and a backward take, the shortest of a few."""
    scale, best = 1 / math.sqrt(q.shape[-1]), math.inf
    for _ in range(_TRIALS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        out, lse = forward_by(kernel, q, k, v, None, causal, scale)
        backward_by(kernel, out, q, k, v, out, lse, None, causal, scale)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every head of q."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _heads_inside(x: Tensor) -> Tensor:
    """[B, H, T, D] that lies in memory as [B, T, H, D]; a copy only where it does not yet."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """With the elements of a row side by side, and no two elements in one place."""
    dense = x.stride(-1) == 1 and all(
        stride > 0 for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    )
    return x if dense else x.contiguous()


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _aligned_bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the efficient kernel wants it: q's dtype, aligned rows, expanded to four full dims."""
    bias = _bias(mask, q.dtype)
    if bias is None:
        return None
    length = k.shape[2]
    bias = bias.to(q.dtype).expand(-1, -1, -1, length)
    rows = F.pad(bias, (0, -length % _MASK_MULTIPLE)).contiguous()
    return rows[..., :length].expand(q.shape[0], q.shape[1], q.shape[2], length)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).mul_(scale)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, -math.inf)
    bias = _bias(mask, scores.dtype)
    return scores if bias is None else scores.add_(bias)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    shift = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    return scores.sub_(shift).exp_()


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition, in float32 or wider."""
    dtype = wide(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), mask, causal, scale)
    lse = scores.logsumexp(-1)
    return (_probabilities(scores, lse) @ v.to(dtype)).to(q.dtype), lse


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = wide(q.dtype)
    grad, wide_q, wide_k, wide_v, out = (x.to(dtype) for x in (grad, q, k, v, out))
    probabilities = _probabilities(_scores(wide_q, wide_k, mask, causal, scale), lse)
    grad_v = probabilities.transpose(-2, -1) @ grad
    inner = (grad * out).sum(-1, keepdim=True)
    grad_scores = (grad @ wide_v.transpose(-2, -1)).sub_(inner).mul_(probabilities).mul_(scale)
    grad_q, grad_k = grad_scores @ wide_k, grad_scores.transpose(-2, -1) @ wide_q
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What the logsumexp of scores of this dtype is kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
