"""Gradients of a GELU, of a layer norm and of heads on a GPU, with the sums of their columns: read once, written once.

In: matrices whose rows lie in one piece. Out: as `summed.py` says. Each program sums the columns of its own rows, and
what they found is added up by torch. Imported only where Triton is there (torch brings it for GPUs).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = 1024
"""Columns of a tile, where these need not be together."""
_OF_GELU, _OF_HEADS = (2, 128), (4, 64)
"""Rows of a tile, and those that one program sums up: 3.5 and 3.0 TB/s on an H200, others down to 3.1 and 2.4."""
_WARPS = 4
"""Of either program."""
_PROGRAMS = 8
"""Of a layer norm, for each multiprocessor: 3.0 TB/s there, with 4 of them 2.5, with 16 of them 2.7."""
_ALONE = 528
"""The same in all, where there is no GPU to ask."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit  # type: ignore[untyped-decorator]
def _gelu(  # type: ignore[no-untyped-def]
    grad, given, result, sums, rows, columns, each: tl.constexpr, high: tl.constexpr, wide: tl.constexpr
):
    """As `gelu.py` has it: Abramowitz and Stegun, 7.1.26."""
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    total = tl.zeros([high, wide], tl.float32)
    for start in range(0, each, high):
        row = tl.program_id(1).to(tl.int64) * each + start + tl.arange(0, high)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        x = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
        incoming = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.abs(x) * 0.23164189 + 1.0
        t = tl.rsqrt(y * y)
        bell = tl.exp2(x * x * -0.7213475204444817)
        tail = t * 1.061405429
        tail = (tail - 1.453152027) * t
        tail = (tail + 1.421413741) * t
        tail = (tail - 0.284496736) * t
        tail = (tail + 0.254829592) * t
        tail = tail * bell * 0.5
        below = tl.where(x < 0, tail, 1 - tail)
        made = (incoming * (below + x * bell * 0.3989422804014327)).to(result.dtype.element_ty)
        tl.store(result + at, made, mask=inside)
        total += made.to(tl.float32)
    tl.store(sums + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _heads(  # type: ignore[no-untyped-def]
    source, result, sums, rows, columns, width, places, entries, of_sample, of_head, of_place, of_entry,
    each: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """`columns` of one source to where they belong in rows of `width`."""
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    shift = (column // entries) * of_head + (column % entries) * of_entry
    total = tl.zeros([high, wide], tl.float32)
    for start in range(0, each, high):
        row = tl.program_id(1).to(tl.int64) * each + start + tl.arange(0, high)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = (row // places) * of_sample + (row % places) * of_place
        found = tl.load(source + place[:, None] + shift[None, :], mask=inside, other=0.0)
        tl.store(result + row[:, None] * width + column[None, :], found, mask=inside)
        total += found.to(tl.float32)
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    grad, given, mean, rstd, weight, added, result, short, sums, rows, columns,
    each: tl.constexpr, has_weight: tl.constexpr, has_added: tl.constexpr, short_type: tl.constexpr,
    apart: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A row at a time; `apart`: what is rounded has memory of its own."""
    column = tl.arange(0, block)
    is_column = column < columns
    factor = tl.full([block], 1.0, tl.float32)
    if has_weight:
        factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    of_weight, of_bias, of_result = (
        tl.zeros([block], tl.float32),
        tl.zeros([block], tl.float32),
        tl.zeros([block], tl.float32),
    )
    for turn in range(each):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        inside = is_column & (row < rows)
        at = row.to(tl.int64) * columns + column
        incoming = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
        center = tl.load(mean + row, mask=row < rows, other=0.0)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
        scaled = tl.where(inside, (x - center) * inverse, 0.0)
        inner = incoming * factor
        middle = tl.sum(inner, 0) / columns
        share = tl.sum(inner * scaled, 0) / columns
        made = (inner - middle - scaled * share) * inverse
        if has_added:
            made += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + at, made.to(result.dtype.element_ty), mask=inside)
        rounded = made.to(result.dtype.element_ty).to(short_type)
        if apart:
            tl.store(short + at, rounded, mask=inside)
        of_weight += incoming * scaled
        of_bias += incoming
        of_result += tl.where(inside, rounded.to(tl.float32), 0.0)
    own = sums + tl.program_id(0) * 3 * columns + column
    tl.store(own, of_weight, mask=is_column)
    tl.store(own + columns, of_bias, mask=is_column)
    tl.store(own + 2 * columns, of_result, mask=is_column)


def gelu_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient, sums of its columns)."""
    grad, x = grad.contiguous(), x.contiguous()
    (rows, columns), (high, each) = x.shape, _OF_GELU
    parts = triton.cdiv(rows, each)
    result, sums = torch.empty_like(grad), x.new_empty((parts, columns), dtype=torch.float32)
    if result.numel():
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _gelu[(triton.cdiv(columns, _WIDE), parts)](
                grad, x, result, sums, rows, columns, each=each, high=high, wide=_WIDE, num_warps=_WARPS
            )
    return result, sums.sum(0)


def heads_beside(sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(matrix, sums of its columns)."""
    first = sources[0]
    samples, heads, places, entries = first.shape
    (rows, columns), (high, each) = (samples * places, heads * entries), _OF_HEADS
    width, parts = len(sources) * columns, triton.cdiv(rows, each)
    result = first.new_empty((rows, width))
    sums = first.new_empty((parts, width), dtype=torch.float32)
    for number, source in enumerate(sources if result.numel() else ()):
        at = slice(number * columns, (number + 1) * columns)
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            _heads[(triton.cdiv(columns, _WIDE), parts)](
                source, result[:, at], sums[:, at], rows, columns, width, places, entries, *source.stride(),
                each=each, high=high, wide=_WIDE, num_warps=_WARPS,
            )  # fmt: skip
    return result, sums.sum(0)


def norm_gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    added: Tensor | None,
    dtype: torch.dtype,
    short: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of gradients as `dtype`, the same as `short` unless it is that, sums by columns for weight, bias and it)."""
    grad, x, mean, rstd = grad.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    added = None if added is None else added.contiguous()
    rows, columns = x.shape
    programs = max(1, min(rows, _programs(x)))
    result = x.new_empty((rows, columns), dtype=dtype)
    rounded = x.new_empty((rows, columns) if short != dtype else (0,), dtype=short)
    sums = x.new_empty((programs, 3, columns), dtype=torch.float32)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _norm[(programs,)](
            grad, x, mean, rstd, weight, added, result, rounded, sums, rows, columns,
            each=triton.cdiv(rows, programs), has_weight=weight is not None, has_added=added is not None,
            short_type=_TYPES[short], apart=short != dtype, block=triton.next_power_of_2(columns), num_warps=_WARPS,
        )  # fmt: skip
    return result, rounded, sums.sum(0)


def _programs(x: Tensor) -> int:
    if not x.is_cuda:
        return _ALONE
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count) * _PROGRAMS
