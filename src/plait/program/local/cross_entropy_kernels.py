"""The loss of many classes on a GPU, a row at a time: scores are read once forward and once backward.

In: scores, [rows, classes], whose rows lie in one piece. Out: the logarithm of each row's sum, and the gradient of the
scores, summed in float32. Imported only where Triton is there (torch brings it for GPUs).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Classes at a time."""
_WARPS = 8
"""Of a program: enough threads for a block, by measurement (bench/gpu.py)."""


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(scores, sums, stride, classes, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    most = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, classes, block):
        at = start + columns
        score = tl.load(scores + row * stride + at, mask=at < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.exp(score - base)
        most = higher
    top = tl.max(most, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(sums + row, base + tl.log(tl.sum(total * tl.exp(most - base), 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _fill_gradients(  # type: ignore[no-untyped-def]
    scores, sums, labels, factors, result, stride, classes, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    total, label, factor = tl.load(sums + row), tl.load(labels + row), tl.load(factors + row)
    for start in range(0, classes, block):
        at = start + columns
        inside = at < classes
        score = tl.load(scores + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.exp(score - total) - tl.where(at == label, 1.0, 0.0)
        tl.store(result + row * classes + at, (share * factor).to(result.dtype.element_ty), mask=inside)


def sum_rows(scores: Tensor) -> Tensor:
    """The logarithm of the sum of each row's exponentials."""
    rows, classes = scores.shape
    sums = scores.new_empty(rows, dtype=torch.float32)
    if rows:
        with torch.cuda.device(scores.device):
            _sum_rows[(rows,)](scores, sums, scores.stride(0), classes, block=_BLOCK, num_warps=_WARPS)
    return sums


def gradients(scores: Tensor, sums: Tensor, labels: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """(softmax - 1 at the label) * factor of the row, [rows, classes] in `dtype`."""
    rows, classes = scores.shape
    result = scores.new_empty(rows, classes, dtype=dtype)
    if rows:
        with torch.cuda.device(scores.device):
            _fill_gradients[(rows,)](
                scores, sums, labels.contiguous(), factors.contiguous(), result, scores.stride(0), classes,
                block=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return result
