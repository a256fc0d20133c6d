"""Matrices transposed and rounded to 8 bits on a GPU, a tile at a time: read once, written once.

In: a matrix in 16 or 8 bits, and what it, or each of its rows, is multiplied by. Out: its transpose in 8 bits. A
compiler's own kernels took twice as long (docs/log.md). Imported only where Triton is there (torch brings it for GPUs).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILES = {2: (256, 64), 1: (128, 128)}
"""Rows and columns, by bytes of an entry: lines of 128 bytes are read and written. Of 16 bits 4.0 of the 4.3 TB/s of a
copy on an H200 where rows have 8,192 entries, 2.6 where they have 2,048."""
_WARPS = 8
"""Of that tile: as it was measured."""
_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    matrix, factor, result, rows, columns,
    by_row: tl.constexpr, kind: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * high + tl.arange(0, high)
    column = tl.program_id(0).to(tl.int64) * wide + tl.arange(0, wide)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(matrix + row[:, None] * columns + column[None, :], mask=inside).to(tl.float32)
    if by_row:
        tile *= tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
    else:
        tile *= tl.load(factor)
    turned = tl.trans(tile.to(kind))
    tl.store(result + column[:, None] * rows + row[None, :], turned, mask=tl.trans(inside))


def turn(matrix: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The transpose of matrix * factor, in `dtype`; of several factors each is for a row."""
    matrix, factor = matrix.contiguous(), factor.contiguous()
    rows, columns = matrix.shape
    high, wide = _TILES[matrix.element_size()]
    result = matrix.new_empty((columns, rows), dtype=dtype)
    if result.numel():
        with torch.cuda.device_of(matrix):  # type: ignore[no-untyped-call]
            _turn[(triton.cdiv(columns, wide), triton.cdiv(rows, high))](
                matrix, factor, result, rows, columns,
                by_row=factor.dim() > 0, kind=_TYPES[dtype], high=high, wide=wide, num_warps=_WARPS,
            )  # fmt: skip
    return result
