"""Torch's own rules, for ops without one of ours: right on real tensors, and only where pieces keep their promise."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.unit.program.one_op import one_op, run_on_ranks
from torch import Tensor

from plait.program.place.placement import AxisShares, P, R, Shard, Strategy
from plait.program.place.rules import Op, dtensor_fallback, find_rule
from plait.program.place.rules.dtensor_fallback import dtensor_strategies

aten = torch.ops.aten
AXIS = AxisShares(name="data", units=(2, 1, 3))
S = Shard
pytestmark = pytest.mark.skipif(
    dtensor_fallback._single_dim_rule(aten.linalg_inv_ex.default) is None,
    reason="this torch has no table of rules for one mesh dim",
)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CALLS: tuple[tuple[Any, Sequence[Any], Strategy], ...] = (
    (aten.linalg_inv_ex.default, (x(6, 4, 4),), Strategy((S(0),), (S(0), S(0)))),
    (aten._linalg_det.default, (x(6, 4, 4),), Strategy((S(0),), (S(0),) * 3)),
    (aten.median.dim, (x(6, 5), 1), Strategy((S(0),), (S(0), S(0)))),
    (aten.kthvalue.default, (x(6, 4), 2, 1), Strategy((S(0),), (S(0), S(0)))),
    (aten._fft_r2c.default, (x(6, 8), [1], 0, True), Strategy((P,), (P,))),
    (aten.index_fill.int_Scalar, (x(6, 4), 1, torch.tensor([1, 2]), 0.5), Strategy((S(0), R), (S(0),))),
    (aten.bucketize.Tensor, (x(5), x(6).sort().values), Strategy((R, S(0)), (P,))),
)


@pytest.mark.parametrize(
    ("target", "args", "listed"), CALLS, ids=lambda value: str(value) if callable(value) else ""
)
def test_what_torch_says_is_right(target: Any, args: Sequence[Any], listed: Strategy) -> None:
    assert find_rule(target) is None, "it has a rule of ours: take another op as an example"
    op = one_op(target, args)
    found = dtensor_strategies(Op(op.node, AXIS))
    assert listed in found
    for strategy in found:
        for whole, parts in zip(op.expected, run_on_ranks(op, strategy, AXIS), strict=True):
            for part in parts:
                torch.testing.assert_close(part, whole, msg=f"{target} as {strategy}")


def test_an_op_that_is_told_a_size_is_not_cut() -> None:
    """Its argument would have to be another one on every rank."""
    args = (x(6, 2, 8, 8), [8, 8], [6, 2, 4, 4], False)
    op = one_op(aten._upsample_bilinear2d_aa_backward.default, args)
    assert not [s for s in dtensor_strategies(Op(op.node, AXIS)) if S(0) in s.inputs]


@pytest.mark.parametrize(
    ("target", "args"),
    [(aten.native_dropout.default, (x(6, 4), 0.5, True)), (aten.histc.default, (x(6), 3))],
    ids=str,
)
def test_random_numbers_and_unknown_ops_have_no_strategy(target: Any, args: Sequence[Any]) -> None:
    assert dtensor_strategies(Op(one_op(target, args).node, AXIS)) == []


def test_a_rule_that_fails_gives_no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError("arguments that it does not know")

    monkeypatch.setattr(dtensor_fallback, "_single_dim_rule", lambda _: fails)
    op = one_op(aten.linalg_inv_ex.default, (x(6, 4, 4),))
    assert dtensor_strategies(Op(op.node, AXIS)) == []
