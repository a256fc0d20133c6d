"""One step of Adam for many tensors in one launch, on a GPU: every number is read once and written once.

In: addresses of gradients, float32 weights and moments, and of 16-bit weights that are to be rounded from them. Out:
all but the gradients, changed. Imported only where Triton is there (torch brings it for GPUs).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Entries that one program updates: 4.2 of the 4.3 TB/s of a copy on an H200, larger ones down to 3.2."""
_WARPS = 4
"""Of such a program: as it was measured."""
_COLUMNS = 6
"""Of the table: entries, gradient, weight, first moment, second moment, short weight."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None}


@triton.jit  # type: ignore[untyped-decorator]
def _pointer(row, column: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(kind)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _update_block(  # type: ignore[no-untyped-def]
    row, at, inside, rate, first, second, small, decay, mean_factor, root,
    gradient_type: tl.constexpr, short_type: tl.constexpr, decoupled: tl.constexpr, negated: tl.constexpr,
):  # fmt: skip
    weights, means, squares = (
        _pointer(row, 2, tl.float32),
        _pointer(row, 3, tl.float32),
        _pointer(row, 4, tl.float32),
    )
    gradient = tl.load(_pointer(row, 1, gradient_type) + at, mask=inside).to(tl.float32)
    weight = tl.load(weights + at, mask=inside)
    mean = tl.load(means + at, mask=inside)
    square = tl.load(squares + at, mask=inside)
    if negated:
        gradient = -gradient
    if decoupled:
        weight -= rate * decay * weight
    else:
        gradient += decay * weight
    mean = first * mean + (1 - first) * gradient
    square = second * square + (1 - second) * gradient * gradient
    weight -= rate / mean_factor * mean / (tl.sqrt(square) / root + small)
    tl.store(weights + at, weight, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)
    if short_type is not None:
        tl.store(_pointer(row, 5, short_type) + at, weight.to(short_type), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    table, blocks, corrections, rate, first, second, small, decay,
    gradient_type: tl.constexpr, short_type: tl.constexpr, decoupled: tl.constexpr, negated: tl.constexpr,
    columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`blocks`: of every program its tensor and the first of its entries, in blocks; `corrections`: of every tensor
    1 - first^step and the root of 1 - second^step."""
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * block
    row = table + tensor * columns
    at = start + tl.arange(0, block)
    size = tl.load(row)
    mean_factor, root = tl.load(corrections + 2 * tensor), tl.load(corrections + 2 * tensor + 1)
    if start + block <= size:  # no mask: 16 bytes at a time
        _update_block(
            row, at, None, rate, first, second, small, decay, mean_factor, root,
            gradient_type, short_type, decoupled, negated,
        )  # fmt: skip
    else:
        _update_block(
            row, at, at < size, rate, first, second, small, decay, mean_factor, root,
            gradient_type, short_type, decoupled, negated,
        )  # fmt: skip


def update(
    table: Tensor,
    blocks: Tensor,
    corrections: Tensor,
    programs: int,
    options: tuple[float, float, float, float, float],
    gradient: torch.dtype,
    short: torch.dtype | None,
    *,
    decoupled: bool,
    negated: bool,
    device: torch.device,
) -> None:
    """One step; `options`: rate, both factors of the moments, the small number below, decay."""
    with torch.cuda.device(device):
        _update[(programs,)](
            table, blocks, corrections, *map(float, options), gradient_type=_TYPES[gradient],
            short_type=_TYPES[short], decoupled=decoupled, negated=negated, columns=_COLUMNS, block=BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip


def try_out(device: torch.device) -> None:
    """Build one, and raise what is in the way."""
    numbers = [torch.zeros(4, device=device) for _ in range(4)]
    table = torch.tensor([[4, *(number.data_ptr() for number in numbers), 0]], device=device)
    update(
        table, torch.zeros(1, 2, dtype=torch.int32, device=device), torch.ones(1, 2, device=device), 1,
        (0.1, 0.9, 0.99, 1.0, 0.0), torch.float32, None, decoupled=True, negated=False, device=device,
    )  # fmt: skip
