"""Ops on images and sequences cut by rows: right on 2 and 3 ranks, and beside samples or channels that are cut."""

from itertools import product

import pytest
import torch
from tests.unit.program.in_mailboxes import run_op
from tests.unit.program.one_op import OneOp, one_op
from tests.unit.program.spatial_examples import SPATIAL_EXAMPLES, SpatialExample
from torch import Tensor

from plait.program.place.placement import AxisShares, P, R, Shard, Strategy, overlaps
from plait.program.place.propagate import candidates
from plait.program.place.rules import Op, base


def _ids(example: SpatialExample) -> str:
    shapes = [tuple(arg.shape) for arg in example.args[:3] if isinstance(arg, Tensor)]
    return f"{example.target}{shapes}".replace(" ", "")


def _axis(ranks: int, name: str = "domain") -> AxisShares:
    return AxisShares(name=name, units=(1,) * ranks)


def _check(op: OneOp, strategies: list[Strategy], axes: list[AxisShares]) -> None:
    where = f"{op.node.target} as {' and '.join(map(str, strategies))}"
    for position, whole, actual in zip(op.positions, op.expected, run_op(op, strategies, axes), strict=True):
        torch.testing.assert_close(
            actual, whole, rtol=1e-10, atol=1e-10, msg=lambda m: f"{where}: output {position}: {m}"  # noqa: B023
        )  # fmt: skip


@pytest.mark.parametrize("example", SPATIAL_EXAMPLES, ids=_ids)
def test_rows_on_several_ranks(example: SpatialExample) -> None:
    op = one_op(example.target, example.args)
    listed = candidates(Op(op.node, _axis(2)))
    for dim in example.dims:
        assert any(s.inputs[0] == Shard(dim) for s in listed), f"dim {dim} cannot be cut"
    for dim in example.not_dims:
        assert not any(s.inputs[0] == Shard(dim) for s in listed), f"dim {dim} does not line up"
    for ranks in (1, 2, 3):
        for strategy in candidates(Op(op.node, _axis(ranks))):
            if _is_spatial(op, strategy):
                _check(op, [strategy], [_axis(ranks)])


ONE_PER_OP = {
    (example.target, any(arg is True for arg in example.args)): example
    for example in reversed(SPATIAL_EXAMPLES)
}
"""The first example of each op; of convolutions also of transposed ones, of attention also of causal one."""


@pytest.mark.parametrize("example", ONE_PER_OP.values(), ids=_ids)
def test_rows_and_something_else_on_two_axes(example: SpatialExample) -> None:
    """Samples in unequal shares (one of them empty), or channels, or other rows, beside rows."""
    op = one_op(example.target, example.args)
    for first in (AxisShares(name="data", units=(1, 0, 1)), _axis(2, "tensor")):
        second = _axis(2)
        whole = Op(op.node, first).same(R)
        for a, b in product(candidates(Op(op.node, first)), candidates(Op(op.node, second))):
            if not _is_spatial(op, b) or P in a.inputs or a == whole or _meet(a, b, first, second):
                continue
            _check(op, [a, b], [first, second])


def _is_spatial(op: OneOp, strategy: Strategy) -> bool:
    further = [s for rule in base.further_rules(op.node.target) for s in rule(Op(op.node, _axis(2)))]
    return strategy in further


def _meet(a: Strategy, b: Strategy, first: AxisShares, second: AxisShares) -> bool:
    pairs = zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)
    return any(overlaps(p, first, q, second) for p, q in pairs)


def test_unequal_shares_have_no_halos() -> None:
    example = SPATIAL_EXAMPLES[0]
    op = one_op(example.target, example.args)
    listed = candidates(Op(op.node, AxisShares(name="data", units=(2, 1, 3))))
    assert not any(s.inputs[0] in (Shard(2), Shard(3)) for s in listed)


def test_every_op_with_further_strategies_has_an_example() -> None:
    shown = {example.target.overloadpacket for example in SPATIAL_EXAMPLES}
    assert not sorted(str(target) for target in set(base._FURTHER) - shown)


def test_a_mask_for_all_queries_stays_whole() -> None:
    q = torch.zeros(2, 4, 12, 4, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    op = one_op(torch.ops.plait.attention.default, (q, q, q, mask, False, 0.5))
    assert Strategy((Shard(2), R, R, R), (Shard(2), Shard(2))) in candidates(Op(op.node, _axis(2)))


def test_statistics_of_half_precision_are_kept_in_full() -> None:
    """Beside the whole op, which sums in float32: bfloat16 has 8 bits, and its sums of 24 numbers would lose two."""
    image = torch.randn(2, 4, 6, 2, generator=torch.Generator().manual_seed(0)).bfloat16() + 5
    ones = torch.ones(4, dtype=torch.bfloat16)
    op = one_op(torch.ops.aten.native_group_norm.default, (image, ones, ones, 2, 4, 12, 2, 1e-5))
    found = run_op(op, [Strategy((Shard(2), R, R), (Shard(2), R, R))], [_axis(2)])
    for actual, whole in zip(found, op.expected, strict=True):
        assert actual.dtype == whole.dtype
        torch.testing.assert_close(actual, whole, rtol=2**-8, atol=2**-8)
