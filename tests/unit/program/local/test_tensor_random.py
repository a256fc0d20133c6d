"""Random numbers on axes other than `data`: a piece is what the whole tensor has in its place."""

import pytest
import torch
from tests.unit.program.one_op import one_op, run_on_ranks
from tests.unit.program.op_examples import DRAWN, Example

from plait.program.place.placement import AxisShares, Shard
from plait.program.place.propagate import candidates
from plait.program.place.rules import Op


@pytest.mark.parametrize("example", DRAWN, ids=str)
def test_pieces_are_those_of_the_whole(example: Example) -> None:
    op = one_op(example.target, example.args, example.kwargs)
    axis = AxisShares(name="tensor", units=(1, 1, 1))
    found = [s for s in candidates(Op(op.node, axis)) if isinstance(s.outputs[0], Shard)]
    assert len(found) == len(op.expected[0].shape)
    for strategy in found:
        (parts,) = run_on_ranks(op, strategy, axis)
        for part in parts:
            assert torch.equal(part, op.expected[0]), f"{example.target} as {strategy}"


def test_pieces_of_outer_parts_are_no_way_to_draw() -> None:
    """They are taken out of all numbers instead, so that every mesh sees the same ones."""
    op = one_op(DRAWN[0].target, DRAWN[0].args)
    for name in ("data", "tensor"):
        axis = AxisShares(name=name, units=(1, 1))
        outers = {
            s.outputs[0].outer
            for s in candidates(Op(op.node, axis, frozenset({2, 3})))
            if isinstance(s.outputs[0], Shard)
        }
        assert outers == {1}
