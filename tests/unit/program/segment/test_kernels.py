"""What generated code calls in the place of torch's kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.program.segment.kernels import KERNELS

aten = torch.ops.aten
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.copy.default, (torch.ones(3, 4),)),
    (aten.copy.default, (torch.arange(4.0, dtype=torch.float64),)),
    (aten.slice_scatter.default, (torch.ones(3, 2), 1, 1, 3)),
    (aten.slice_scatter.default, (torch.ones(2, 4), 0, 0, 9223372036854775807, 2)),
    (aten.select_scatter.default, (torch.ones(3), 1, -1)),
    (aten.diagonal_scatter.default, (torch.ones(3),)),
]


def inside_a_message(values: Tensor) -> Tensor:
    """As a stage receives it: other tensors lie beside, so that the bytes of all are no multiple of an element."""
    flat = torch.zeros(values.nbytes + 6, dtype=torch.uint8)
    made = flat[: values.nbytes].view(values.dtype).view(values.shape)
    return made.copy_(values)


@pytest.mark.parametrize(("op", "rest"), CASES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_as_torchs_wherever_the_tensor_lies(op: Any, rest: tuple[Any, ...], transposed: bool) -> None:
    values = torch.arange(12.0).view(3, 4)
    values = values.t().contiguous().t() if transposed else values
    expected = op(values, *rest)
    base = inside_a_message(values.t().contiguous()).t() if transposed else inside_a_message(values)
    before = base.clone()
    made = KERNELS[op](base, *rest)
    assert torch.equal(made, expected) and made.stride() == expected.stride() and torch.equal(base, before)
    assert made.untyped_storage().nbytes() == values.nbytes
    with pytest.raises(RuntimeError, match="nbytes"):  # once torch can, they may go
        op(base, *rest)


def test_a_tensor_that_shows_one_number_many_times() -> None:
    assert torch.equal(KERNELS[aten.copy.default](torch.zeros(1).expand(3), torch.ones(3)), torch.ones(3))
