"""Digests find any flipped bit, and say who is wrong where that can be said."""

import pytest
import torch

from plait.plan.mesh import Mesh
from plait.program.layout import Held, Layout
from plait.program.place.placement import AxisShares, Replicate, Shard
from plait.run.hold.replicas import digest, outvoted, replicas_of


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool]
)
@pytest.mark.parametrize("count", [1, 3, 64])
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype, count: int) -> None:
    room = (torch.randn(count + 3) * 100).to(dtype)
    for start in (0, 3):  # also where the memory does not begin at a whole word
        tensor = room[start : start + count]
        before = int(digest(tensor))
        raw = tensor.view(torch.uint8)
        for byte in range(0, len(raw), max(1, len(raw) // 9)):
            for bit in range(8):
                raw[byte] ^= 1 << bit
                assert int(digest(tensor)) != before
                raw[byte] ^= 1 << bit
        assert int(digest(tensor)) == before


def test_a_tensor_that_is_not_contiguous_has_the_digest_of_its_elements() -> None:
    tensor = torch.randn(4, 6)
    assert int(digest(tensor.t())) == int(digest(tensor.t().contiguous()))
    assert int(digest(torch.empty(0))) == 0


def test_the_majority_is_right() -> None:
    assert outvoted({0: 5, 1: 5}) == ([], [0, 1])
    assert outvoted({0: 5, 1: 6, 2: 5}) == ([1], [0, 2])
    assert outvoted({0: 5, 1: 6}) == ([0, 1], [])
    assert outvoted({0: 5, 2: 6, 4: 5, 6: 6}) == ([0, 2, 4, 6], [])


def test_replicas_are_ranks_with_the_same_part() -> None:
    mesh = Mesh(axes=(("data", 2), ("tensor", 2)))
    axes = (AxisShares(name="data", units=(1, 1)), AxisShares(name="tensor", units=(1, 1)))
    layout = Layout(
        mesh=mesh,
        axes=axes,
        parameters={
            "norm": Held(shape=(4,), placements=(Replicate(), Replicate())),
            "weight": Held(shape=(4, 4), placements=(Replicate(), Shard(0))),
        },
    )
    assert replicas_of(None, "weight", 3, "cpu") == [[0, 1, 2]]
    assert replicas_of(layout, "norm", 4, "cpu") == [[0, 1, 2, 3]]
    assert replicas_of(layout, "norm", 4, "cuda") == [[0, 2], [1, 3]]
    assert replicas_of(layout, "weight", 4, "cpu") == [[0, 2], [1, 3]]
