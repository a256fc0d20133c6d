"""What our own ops make lies in memory as their rules for fake tensors say: compiled code reads it without looking."""

from typing import Any

import pytest
import torch
from tests.unit.program.op_examples import EXAMPLES, Example
from torch import Tensor

from plait.torch_private import pytree
from plait.torch_private.fake import FakeTensorMode

OURS = [example for example in EXAMPLES if str(example.target).startswith("plait.")]


def turned(value: Any, how: str) -> Any:
    """The same numbers, lying otherwise."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if how == "first":
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "last":
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "channels last" and value.dim() in (4, 5):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return value.contiguous(memory_format=formats[value.dim()])
    return torch.stack((value, value), -1)[..., 0] if how == "apart" else value


def lies(value: Tensor) -> tuple[object, ...]:
    """What is left to say of an entry that stands alone."""
    strides = [step for step, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    return value.shape, strides, value.dtype


@pytest.mark.parametrize("how", ["as it is", "first", "last", "channels last", "apart"])
@pytest.mark.parametrize("example", OURS, ids=str)
def test_an_op_keeps_what_its_rule_says(example: Example, how: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args = [pytree.tree_map(lambda leaf: turned(leaf, how), arg) for arg in example.args]
    found = example.target(*args, **example.kwargs)
    fakes = pytree.tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, args)
    with mode:
        said = example.target(*fakes, **example.kwargs)
    for real, fake in zip(pytree.tree_leaves(found), pytree.tree_leaves(said), strict=True):
        if isinstance(real, Tensor) and fake.numel():  # what a library keeps for itself has any size
            assert lies(real) == lies(fake)
