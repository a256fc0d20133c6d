"""What a rank computes where a global op is more than the same op on a shard: batch statistics over all ranks.

In and out: real tensors of one rank (or fakes, for shapes). Communication is between these functions, never in them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.graph.ops.batch_norm import memory_format_of

aten = torch.ops.aten


def batch_statistics(x: Tensor, like: Tensor) -> Tensor:
    """This rank's mean and biased variance by channel, as one [1, 2, channels] row; zeros for an empty share."""
    channels = x.shape[1]
    if x.numel() == 0:
        return like.new_zeros((1, 2, channels))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    var, mean = torch.var_mean(x.to(like.dtype), dim=dims, correction=0)
    return torch.stack((mean, var)).unsqueeze(0)


def combine_statistics(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks from each rank's own (Chan et al. 1979), weighted by their counts."""
    weight = torch.tensor(
        [count / sum(counts) for count in counts], dtype=rows.dtype, device=rows.device
    ).unsqueeze(1)
    means, variances = rows[:, 0], rows[:, 1]
    mean = (weight * means).sum(0)
    return mean, (weight * (variances + (means - mean) ** 2)).sum(0)


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Normalize with given statistics."""
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=memory_format_of(x))
    output: Tensor = aten.native_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return output.contiguous(memory_format=memory_format_of(x))


def inverse_deviation(var: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var + eps)."""
    return torch.rsqrt(var + eps)


def running_average(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """The running statistic after one batch."""
    return old * (1 - momentum) + new * momentum


def running_variance(old: Tensor, var: Tensor, momentum: float, count: int) -> Tensor:
    """The running variance after one batch of `count` elements a channel; it averages the unbiased variance."""
    return old * (1 - momentum) + var * (momentum * count / max(count - 1, 1))


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """This rank's sums over its samples, by channel: [gradient of the weight, gradient of the bias]."""
    if x.numel() == 0:
        return mean.new_zeros((2, mean.shape[0]))
    ones = torch.ones_like(mean)
    _, weight, bias = aten.native_batch_norm_backward.default(
        grad.contiguous(), x, ones, None, None, mean, invstd, True, eps, [False, True, True]
    )
    return torch.stack((weight, bias))


def take_row(rows: Tensor, index: int) -> Tensor:
    """One row, as a tensor of its own."""
    return rows[index].clone()


def input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, count: int
) -> Tensor:
    """Gradient of the input, given the sums over all ranks and the number of elements a channel over all ranks.

    dx = a (grad - sums_bias / n - xhat sums_weight / n) with a = invstd * weight, written as a * grad + b * x + c.
    """
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = invstd if weight is None else invstd * weight
    slope = -scale * invstd * sums[0] / count
    shift = -scale * sums[1] / count - slope * mean
    result = torch.addcmul(shift.view(shape), x.to(mean.dtype), slope.view(shape))
    result = result.addcmul_(grad.to(mean.dtype), scale.view(shape)).to(x.dtype)
    return result.contiguous(memory_format=memory_format_of(x))


def nothing(inputs: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Zeros in place of an op on an empty share; the op's `inputs` keep what it waits for in the graph."""
    return inputs[0].new_zeros(shape, dtype=dtype)


def nothings(
    inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor, ...]:
    """`nothing` in place of an op that gives several tensors."""
    return tuple(nothing(inputs, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def weighted_share(value: Tensor, fraction: float) -> Tensor:
    """A rank's summand of an average over ranks; an empty share has none."""
    return torch.zeros_like(value) if fraction == 0 else value * fraction
