"""Ops on images and sequences whose rows are on several ranks: what each rank needs of its neighbours, and no more.

In: an op and an axis whose ranks have equal shards. Out: strategies that cut a spatial dim, or the dim of a sequence. A
window that slides over the dim must start as many rows into every rank's shard: extents that do not line up, and halos
wider than a neighbour's shard, are no candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.plan.plan import DATA
from plait.program.place.placement import Placement
from plait.program.place.rules.base import Op, P, R, Shard, Strategy, aten, further, ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What a window that slides over a cut dim reads beyond a rank's own rows."""

    before: int
    """Rows of the rank before."""
    after: int
    """Rows of the next rank."""
    unread: int
    """Rows at the end of the shard that no window reads."""


def has_equal_shards(op: Op) -> bool:
    """Whether every rank of the axis has one unit, so that each has rows to give; `data` cuts samples."""
    return op.axis.name != DATA and set(op.axis.units) == {1}


def num_spatial(op: Op) -> int:
    """How many of the op's dims, counted from the last, are spatial."""
    return next(count for count in (1, 2, 3) if f"{count}d" in str(op.node.target))


def per_dim(value: Any, index: int, missing: int) -> int:
    """One entry of an argument that has one per spatial dim, or one for all, or none."""
    if isinstance(value, int):
        return value
    entries = list(value)
    return int(entries[index if len(entries) > 1 else 0]) if entries else missing


def _slide(
    op: Op, rows: int, results: int, size: int, stride: int, padding: int, dilation: int
) -> Window | None:
    """The window over a dim of `rows` that gives `results`; None where ranks' shards do not line up with it."""
    ranks, span = op.axis.total, (size - 1) * dilation
    if rows % ranks or results % ranks or rows != stride * results or padding > span:
        return None
    beyond = span + 1 - stride - padding
    if max(padding, beyond) > rows // ranks or beyond > padding:
        return None
    return Window(before=padding, after=max(beyond, 0), unread=max(-beyond, 0))


def convolution_window(op: Op, dim: int) -> Window | None:
    """Of a convolution or its backward: over the input, or over the output of a transposed one."""
    backward = op.node.target is aten.convolution_backward.default
    source = op.shapes[1 if backward else 0]
    result = op.shapes[0] if backward else op.out
    index = dim - 2
    rows, results = source[dim], result[dim]
    if op.arg("transposed"):
        rows, results = results, rows
    weight = op.shapes[2 if backward else 1]
    return _slide(
        op,
        rows,
        results,
        weight[dim],
        per_dim(op.arg("stride"), index, 1),
        per_dim(op.arg("padding"), index, 0),
        per_dim(op.arg("dilation"), index, 1),
    )


@further(aten.convolution)
def convolution(op: Op) -> list[Strategy]:
    """Rows of the image; the kernel is whole."""
    if not has_equal_shards(op) or len(op.shapes[0]) != len(op.shapes[1]):
        return []
    dims = [dim for dim in range(2, len(op.out)) if convolution_window(op, dim) is not None]
    return [op.by_name((Shard(dim),), input=Shard(dim)) for dim in dims]


@further(aten.convolution_backward)
def convolution_backward(op: Op) -> list[Strategy]:
    """The gradient of the kernel is a sum over the rows of all ranks."""
    if not has_equal_shards(op):
        return []
    dims = [dim for dim in range(2, len(op.shapes[0])) if convolution_window(op, dim) is not None]
    return [op.by_name((Shard(dim), P, P), grad_output=Shard(dim), input=Shard(dim)) for dim in dims]


def pool_window(op: Op, dim: int) -> Window | None:
    """Of a pool or its backward, over the input."""
    backward = "backward" in str(op.node.target)
    source, result = (op.shapes[1], op.shapes[0]) if backward else (op.shapes[0], op.out)
    index = dim - len(source) + num_spatial(op)
    size, padding = per_dim(op.arg("kernel_size"), index, 1), per_dim(op.arg("padding"), index, 0)
    averages = "avg" in str(op.node.target)
    if averages and padding and not op.arg("count_include_pad") and op.arg("divisor_override") is None:
        return None  # a window at the end divides by fewer rows
    dilation = 1 if averages else per_dim(op.arg("dilation"), index, 1)
    found = _slide(
        op, source[dim], result[dim], size, per_dim(op.arg("stride"), index, size), padding, dilation
    )
    return None if found is not None and found.unread and op.arg("ceil_mode") else found


@further(
    aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
    aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward, aten.avg_pool3d, aten.avg_pool3d_backward,
)  # fmt: skip
def pool(op: Op) -> list[Strategy]:
    """Rows, with those of the neighbours that windows reach into."""
    return [op.same(Shard(dim)) for dim in _spatial_dims(op) if pool_window(op, dim) is not None]


def _spatial_dims(op: Op) -> Sequence[int]:
    ndim = len(op.shapes[0])
    return range(ndim - num_spatial(op), ndim) if has_equal_shards(op) else ()


@further(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d)
def adaptive_pool(op: Op) -> list[Strategy]:
    """Each result is the mean of a part of the rows: parts of one rank's rows, or of all of them."""
    found = []
    for dim in _spatial_dims(op):
        rows, results = op.shapes[0][dim], op.out[dim]
        if results == 1:
            found.append(Strategy((Shard(dim),), (P,)))
        elif rows % results == 0:
            found.append(op.same(Shard(dim)))
    return found


@further(aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward)
def adaptive_pool_backward(op: Op) -> list[Strategy]:
    found = []
    for dim in _spatial_dims(op):
        rows, results = op.shapes[1][dim], op.shapes[0][dim]
        if results == 1:
            found.append(Strategy((R, Shard(dim)), (Shard(dim),)))
        elif rows % results == 0:
            found.append(op.same(Shard(dim)))
    return found


@further(
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward, aten.upsample_nearest3d_backward,
)  # fmt: skip
def upsample(op: Op) -> list[Strategy]:
    """By a whole factor every row becomes rows of the same rank."""
    small, large = sorted((op.shapes[0], op.out))
    return [op.same(Shard(dim)) for dim in _spatial_dims(op) if large[dim] % small[dim] == 0]


@further(ours.batch_norm)
def batch_norm(op: Op) -> list[Strategy]:
    """Rows, whose statistics are those of all ranks; channels, which are independent."""
    by_channel = op.by_name(
        (Shard(1), *(Shard(0),) * 4), x=Shard(1), weight=Shard(0), bias=Shard(0), mean=Shard(0), var=Shard(0)
    )
    dims = range(2, len(op.shapes[0])) if has_equal_shards(op) else ()
    return [by_channel, *(op.by_name((Shard(dim), R, R, R, R), x=Shard(dim)) for dim in dims)]


@further(ours.batch_norm_backward)
def batch_norm_backward(op: Op) -> list[Strategy]:
    by_channel = op.by_name(
        (Shard(1), Shard(0), Shard(0)),
        grad=Shard(1),
        x=Shard(1),
        weight=Shard(0),
        mean=Shard(0),
        invstd=Shard(0),
    )
    dims = range(2, len(op.shapes[0])) if has_equal_shards(op) else ()
    return [by_channel, *(op.by_name((Shard(d), P, P), grad=Shard(d), x=Shard(d)) for d in dims)]


@further(aten.native_group_norm)
def group_norm(op: Op) -> list[Strategy]:
    """Rows, whose statistics are those of all ranks; whole groups of channels, which are independent."""
    found = []
    if op.axis.divides(int(op.arg("group"))):
        found.append(op.by_name((Shard(1),) * 3, input=Shard(1), weight=Shard(0), bias=Shard(0)))
    dims = range(2, len(op.shapes[0])) if has_equal_shards(op) else ()
    return [*found, *(op.by_name((Shard(dim), R, R), input=Shard(dim)) for dim in dims)]


@further(aten.native_group_norm_backward)
def group_norm_backward(op: Op) -> list[Strategy]:
    found = []
    if op.axis.divides(int(op.arg("group"))):
        cut: dict[str, Placement] = dict.fromkeys(("grad_out", "input", "mean", "rstd"), Shard(1))
        found.append(op.by_name((Shard(1), Shard(0), Shard(0)), **cut, weight=Shard(0)))
    dims = range(2, len(op.shapes[0])) if has_equal_shards(op) else ()
    return [*found, *(op.by_name((Shard(d), P, P), grad_out=Shard(d), input=Shard(d)) for d in dims)]


@further(ours.attention)
def attention(op: Op) -> list[Strategy]:
    """Queries of a sequence are independent, given all keys and values."""
    if not has_equal_shards(op):
        return []
    return [op.by_name((Shard(2), Shard(2)), q=Shard(2), mask=_of_queries(op, 0))]


@further(ours.attention_backward)
def attention_backward(op: Op) -> list[Strategy]:
    """Every query adds to the gradients of all keys and values."""
    if not has_equal_shards(op):
        return []
    cut: dict[str, Placement] = dict.fromkeys(("grad", "q", "out", "lse"), Shard(2))
    return [op.by_name((Shard(2), P, P), **cut, mask=_of_queries(op, 1))]


def _of_queries(op: Op, query: int) -> Placement:
    """A mask is cut with the queries, unless it is the same for all of them."""
    mask = op.arg("mask")
    return Shard(2) if mask is not None and mask.meta["val"].shape[2] == op.shapes[query][2] else R
