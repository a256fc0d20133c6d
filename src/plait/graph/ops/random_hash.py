"""Hash every element's place in the unsharded tensor to 32 random bits.

In: a key (mixed seed, mixed step, first sample), an op id, and which piece of which tensor is wanted. Out: a tensor
filled by a function of uniformly distributed int32, one per element, that depend on nothing else. It never reads a
generator.

The index is split into a row and a column. A row's 64-bit key is splitmix64 over (seed, step, op, row), a column's
32-bit key a mixed index; an element mixes the two with 32-bit multiplications, whose wrap-around is the same on CPU and
CUDA. Columns are the trailing dims (up to 2**16 of them together), chosen from the unsharded extents alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_MAX_COLUMNS = 1 << 16
"""Keys of so many columns are kept, 512 KiB of int64: with the scratch buffers they stay in a core's L2 cache."""
_BLOCK_ELEMENTS = 1 << 15
"""Elements a thread mixes at a time: two int32 scratch buffers of this size stay in its L2 cache."""
Finish = Callable[[Tensor, Tensor], None]
"""(hash, where to write): turns uniformly distributed int32, which it may overwrite, into the numbers wanted."""
Dim = tuple[int, Any, int]
"""(extent, start, stride) of a dim of the piece wanted; the start may be a scalar tensor."""


def signed(value: int) -> int:
    """The int64 with the same low 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _constants(dtype: torch.dtype, *values: int) -> tuple[Tensor, ...]:
    """Scalars as tensors: twice as fast to hand to an op as Python numbers, and as good beside CUDA tensors."""
    return tuple(torch.tensor(signed(value), dtype=torch.int64).to(dtype) for value in values)


def _shift(amount: int, bits: int) -> tuple[Tensor, Tensor]:
    """An amount and the mask that makes torch's arithmetic right shift by it a logical one."""
    amounts = _constants(torch.int32 if bits == 32 else torch.int64, amount, (1 << bits - amount) - 1)
    return amounts[0], amounts[1]


_MULTIPLIERS64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""splitmix64's finalizer: shifts by 30, 27, 31 around these."""
_FIRST64, _SECOND64 = _constants(torch.int64, *_MULTIPLIERS64)
_SHIFT30, _SHIFT27, _SHIFT31 = _shift(30, 64), _shift(27, 64), _shift(31, 64)
_GOLDEN64, _ODD_HIGH = _constants(torch.int64, 0x9E3779B97F4A7C15, 1 << 32)
_SHIFT13, _SHIFT15, _SHIFT16 = _shift(13, 32), _shift(15, 32), _shift(16, 32)
_COLUMN_MULTIPLIERS = _constants(torch.int32, 0x7FEB352D, 0x846CA68B)
"""lowbias32's, with shifts by 16, 15, 16 around them."""
_ELEMENT_MULTIPLIERS = _constants(torch.int32, 0x85EBCA6B, 0xC2B2AE35)


def _fold_(x: Tensor, scratch: Tensor, shift: tuple[Tensor, Tensor]) -> Tensor:
    """x ^= x >> amount. Xor, as sums of shifts and products alone are close to linear in the index."""
    amount, mask = shift
    return x.bitwise_xor_(torch.bitwise_right_shift(x, amount, out=scratch).bitwise_and_(mask))


def _mix64_(x: Tensor) -> Tensor:
    scratch = torch.empty_like(x)
    _fold_(x, scratch, _SHIFT30).mul_(_FIRST64)
    _fold_(x, scratch, _SHIFT27).mul_(_SECOND64)
    return _fold_(x, scratch, _SHIFT31)


def mix64(x: int) -> int:
    """The same on a Python number."""
    x %= 1 << 64
    x = (x ^ x >> 30) * _MULTIPLIERS64[0] % (1 << 64)
    x = (x ^ x >> 27) * _MULTIPLIERS64[1] % (1 << 64)
    return signed(x ^ x >> 31)


def _stream(key: Tensor, op: int) -> int | Tensor:
    """What key and op contribute to every row: a number on CPU; on CUDA, where it would wait, a scalar tensor."""
    seed, step = signed(0xD6E8FEB86659FD93), signed(0xA0761D6478BD642F)
    values = key.tolist() if key.device.type == "cpu" else key
    stream = values[0] * seed + values[1] * step + mix64(op)
    return signed(stream) if isinstance(stream, int) else stream


def _grid(dims: Sequence[Dim], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sum over dims of (start + index) * stride, flattened; whole inner dims are merged first."""
    merged: list[Dim] = [(1, 0, 0)]
    for extent, start, stride in dims:
        outer_extent, outer_start, outer_stride = merged[-1]
        if isinstance(start, int) and start == 0 and outer_stride == extent * stride:
            merged[-1] = (outer_extent * extent, outer_start * extent, stride)
        else:
            merged.append((extent, start, stride))
    total: Tensor | None = None
    for extent, start, stride in merged[1:]:
        index = torch.arange(extent, dtype=dtype, device=device)
        if not isinstance(start, int) or start != 0:
            index += start
        if stride != 1:
            index *= stride
        total = index if total is None else (total.unsqueeze(-1) + index).view(-1)
    return torch.zeros(1, dtype=dtype, device=device) if total is None else total


def _first_column_dim(full: Sequence[int], batch_dim: int) -> int:
    """Where the columns begin: at most 2**16 of them, or the last dim alone, and never the batch dim."""
    columns, dim = 1, len(full)
    while dim > 0 and dim - 1 != batch_dim and (columns == 1 or columns * full[dim - 1] <= _MAX_COLUMNS):
        dim -= 1
        columns *= full[dim]
    return dim


def _layout(
    key: Tensor,
    shape: Sequence[int],
    full: Sequence[int],
    start: Sequence[int],
    batch_dim: int,
    rows_per_sample: int,
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The dims of the rows and those of the columns, with the strides of their indices in the unsharded tensor."""
    extents, starts = list(full or shape), list[Any](start or [0] * len(shape))
    split = _first_column_dim(extents, batch_dim)
    # Samples are outermost whatever their dim, so that no index depends on how many of them there are.
    if batch_dim >= 0:
        first = int(key[2]) if key.device.type == "cpu" else key[2]
        starts[batch_dim], extents[batch_dim] = first * rows_per_sample, 1
    dims: list[Dim] = []
    stride = 1
    for dim in reversed(range(len(shape))):
        if dim == split - 1:
            stride = 1
        dims.insert(0, (shape[dim], starts[dim], stride))
        stride *= extents[dim]
    if batch_dim >= 0:
        dims[batch_dim] = (*dims[batch_dim][:2], math.prod(extents[:split]))
    return tuple(dims[:split]), tuple(dims[split:])


def _row_keys_(index: Tensor, stream: int | Tensor) -> Tensor:
    """Two int32 keys a row, the second one odd."""
    keys = _mix64_(index.mul_(_GOLDEN64).add_(stream)).bitwise_or_(_ODD_HIGH)
    return keys.view(torch.int32).view(-1, 2, 1)


def _column_keys_(index: Tensor) -> Tensor:
    scratch = torch.empty_like(index)
    first, second = _COLUMN_MULTIPLIERS
    _fold_(index, scratch, _SHIFT16).mul_(first)
    _fold_(index, scratch, _SHIFT15).mul_(second)
    return _fold_(index, scratch, _SHIFT16)


@lru_cache(maxsize=64)
def _few_column_keys(dims: tuple[Dim, ...], device: torch.device) -> Tensor:
    """The keys of up to 2**16 columns: at most 16 MiB are kept. To be read only."""
    return _column_keys_(_grid(dims, torch.int32, device))


def _column_blocks(dims: tuple[Dim, ...], block: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Position and keys of each run of at most `block` columns."""
    num_columns = math.prod(dim[0] for dim in dims)
    if num_columns <= _MAX_COLUMNS:
        keys = _few_column_keys(dims, device)
        yield from ((left, keys[left : left + block]) for left in range(0, num_columns, block))
        return
    index = _grid(dims, torch.int32, device)
    for left in range(0, num_columns, block):
        yield left, _column_keys_(index[left : left + block])


def _fill(out: Tensor, rows: Tensor, columns: tuple[Dim, ...], finish: Finish) -> Tensor:
    """Hash every (row, column) and let `finish` write the result: blockwise on CPU, in one piece on CUDA."""
    table = out.view(len(rows), -1)
    block = _BLOCK_ELEMENTS * torch.get_num_threads() if out.device.type == "cpu" else out.numel()
    width = min(table.shape[1], block)
    height = min(max(1, block // width), len(rows))
    hashes, scratches = torch.empty((2, height, width), dtype=torch.int32, device=out.device)
    first_multiplier, second_multiplier = _ELEMENT_MULTIPLIERS
    for left, keys in _column_blocks(columns, width, out.device):
        for top in range(0, len(rows), height):
            piece = table[top : top + height, left : left + width]
            first, second = rows[top : top + height].unbind(1)
            x, scratch = hashes, scratches
            if piece.shape != hashes.shape:
                x, scratch = (buffer.view(-1)[: piece.numel()].view(piece.shape) for buffer in (x, scratch))
            torch.bitwise_xor(keys, first, out=x)
            _fold_(x.mul_(first_multiplier), scratch, _SHIFT15).mul_(second)
            finish(_fold_(x, scratch, _SHIFT13).mul_(second_multiplier), piece)
    return out


def generate(
    key: Tensor,
    op: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    finish: Finish,
    *,
    full: Sequence[int] = (),
    start: Sequence[int] = (),
    batch_dim: int = -1,
    rows_per_sample: int = 1,
) -> Tensor:
    """A tensor of `shape` that `finish` filled; the keywords are those of the ops in `random_ops`."""
    out = torch.empty(shape, dtype=dtype, device=key.device)
    if out.numel() == 0:
        return out
    rows, columns = _layout(key, shape, full, start, batch_dim, rows_per_sample)
    row_keys = _row_keys_(_grid(rows, torch.int64, key.device), _stream(key, op))
    return _fill(out, row_keys, columns, finish)
