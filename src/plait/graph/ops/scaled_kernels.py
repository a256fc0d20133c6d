"""Matrices transposed and rounded to 8 bits on a GPU, a tile at a time: read once, written once.

In: a matrix in 16 bits, and what it is multiplied by. Out: its transpose in 8 bits. A compiler's own kernels took
twice as long (docs/log.md). Imported only where Triton is there (torch brings it for GPUs).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 256, 64
"""Of a tile: 4.0 of the 4.3 TB/s of a copy on an H200 where rows have 8,192 entries, 2.6 where they have 2,048."""
_WARPS = 8
"""Of that tile: as it was measured."""
_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    matrix, factor, result, rows, columns, kind: tl.constexpr, high: tl.constexpr, wide: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64) * high + tl.arange(0, high)
    column = tl.program_id(0).to(tl.int64) * wide + tl.arange(0, wide)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(matrix + row[:, None] * columns + column[None, :], mask=inside).to(tl.float32) * tl.load(
        factor
    )
    turned = tl.trans(tile.to(kind))
    tl.store(result + column[:, None] * rows + row[None, :], turned, mask=tl.trans(inside))


def turn(matrix: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The transpose of matrix * factor, in `dtype`."""
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    result = matrix.new_empty((columns, rows), dtype=dtype)
    if result.numel():
        grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS))
        with torch.cuda.device(matrix.device):
            _turn[grid](
                matrix,
                factor,
                result,
                rows,
                columns,
                kind=_TYPES[dtype],
                high=_ROWS,
                wide=_COLUMNS,
                num_warps=_WARPS,
            )
    return result
