"""What a rank computes on its rows of an image or a sequence, where that is not one op of torch.

In and out: real tensors of one rank (or fakes, for shapes). Communication is between these functions, never in them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """A number per channel."""
    return x + bias.view(-1, *(1 for _ in x.shape[2:]))


def bias_gradient(grad: Tensor) -> Tensor:
    """The sum over all but the channels."""
    return grad.sum([dim for dim in range(grad.ndim) if dim != 1])


def resized_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory of another shape, for an op that looks at the shape alone."""
    return x.new_empty(list(shape))


def laid_out(x: Tensor) -> Tensor:
    """As torch's kernels of group norm take it: they read memory in order, with channels first, or last on a CPU."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if x.device.type == "cpu" and last is not None and x.is_contiguous(memory_format=last):
        return x
    return x.contiguous()


def in_order(x: Tensor) -> Tensor:
    """Its numbers one after the other, for kernels that read memory and not strides."""
    return x.contiguous()


def laid_out_as(gradient: Tensor, x: Tensor) -> Tensor:
    """In memory as `x` is: torch's kernel reads both in the order of `x`, and communication leaves channels first."""
    return gradient if gradient.stride() == x.stride() else torch.empty_like(x).copy_(gradient)


def divide(x: Tensor, count: int) -> Tensor:
    """A rank's summand of a mean over ranks."""
    return x / count


def moved_indices(
    indices: Tensor, extents: Sequence[int], shifts: Sequence[int], new_extents: Sequence[int]
) -> Tensor:
    """Positions in an image of some extents as positions in another one, in which they lie `shifts` further."""
    found = torch.zeros_like(indices)
    rest, stride = indices, 1
    for extent, shift, new in zip(reversed(extents), reversed(shifts), reversed(new_extents), strict=True):
        found = found + (rest % extent + shift) * stride
        rest, stride = rest.div(extent, rounding_mode="floor"), stride * new
    return found


def first_row(offset: int, rows: int, before: int) -> int:
    """Where the shard of a rank with its halo starts in the whole."""
    return offset * rows - before


def opposite(number: int) -> int:
    """Minus."""
    return -number


def visible_keys(q: Tensor, keys: int, offset: int) -> Tensor:
    """[1, 1, queries, keys]: causal attention of a rank whose first query is `offset` times as many further."""
    first = offset * q.shape[2]
    queries = torch.arange(first, first + q.shape[2], device=q.device)
    return (torch.arange(keys, device=q.device) <= queries.unsqueeze(1)).view(1, 1, q.shape[2], keys)


def group_statistics(x: Tensor, groups: int) -> Tensor:
    """This rank's mean and biased variance by sample and group, as one [1, 2, samples, groups] row."""
    var, mean = torch.var_mean(_grouped(x, groups), dim=(2, 3), correction=0)
    return torch.stack((mean, var)).unsqueeze(0)


def combine_groups(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation over ranks that have as many elements each."""
    means, variances = rows[:, 0], rows[:, 1]
    mean = means.mean(0)
    return mean, torch.rsqrt((variances + (means - mean) ** 2).mean(0) + eps)


def normalize_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    """Normalize with given statistics."""
    y = (_grouped(x, mean.shape[1]) - mean[..., None, None]) * rstd[..., None, None]
    y = y.view(x.shape)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the op that is replaced gives it."""
    return x.to(dtype)


def group_sums(grad: Tensor, x: Tensor) -> Tensor:
    """[2, samples, channels]: the sums over this rank's rows of grad * x and of grad."""
    dims = list(range(2, x.ndim))
    grad, x = _wide(grad), _wide(x)
    return torch.stack(((grad * x).sum(dims), grad.sum(dims)))


def group_weight_gradients(
    sums: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, from the sums over rows."""
    repeat = sums.shape[2] // mean.shape[1]
    mean, rstd = mean.repeat_interleave(repeat, 1), rstd.repeat_interleave(repeat, 1)
    return ((sums[0] - sums[1] * mean) * rstd).sum(0).to(dtype), sums[1].sum(0).to(dtype)


def group_input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, sums: Tensor, count: int
) -> Tensor:
    """Gradient of the input, given the sums over all ranks' rows and the elements of a group over all ranks."""
    samples, groups = mean.shape
    mean, rstd = _wide(mean), _wide(rstd)
    scale = torch.ones_like(sums[0]) if weight is None else _wide(weight).expand_as(sums[0])
    both = (sums * scale).view(2, samples, groups, -1).sum(-1)
    slope = (both[1] * mean - both[0]) * rstd**3 / count
    shift = -slope * mean - both[1] * rstd / count
    scaled = _wide(grad) * scale.view(*scale.shape, *(1 for _ in x.shape[2:]))
    result = _grouped(scaled, groups) * rstd[..., None, None] + _grouped(x, groups) * slope[..., None, None]
    return (result + shift[..., None, None]).view(x.shape).to(x.dtype)


def _grouped(x: Tensor, groups: int) -> Tensor:
    return _wide(x).reshape(x.shape[0], groups, x.shape[1] // groups, -1)


def _wide(x: Tensor) -> Tensor:
    """Statistics of half precision are kept in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
