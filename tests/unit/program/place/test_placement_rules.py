"""Every placement rule is right on real tensors: cut as it says, computed on each rank, put together again.

An op that has a rule but no example in `op_examples.py` fails here, so a new rule needs one.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.program.one_op import OneOp, one_op, run_on_ranks
from tests.unit.program.op_examples import EXAMPLES, Example
from torch import Tensor, fx

from plait.program.local import lowering
from plait.program.place.placement import AxisShares, P, Placement, R, Shard, Strategy
from plait.program.place.propagate import candidates
from plait.program.place.rules import Op, base

UNITS = ((2, 0, 1, 3), (1, 0), (6,))
"""Unequal shares and an empty one; a batch of one sample; a single rank."""
NEVER_CUT = {"aten.max.other", "aten.argmax.default", "aten.norm.Scalar"}
"""Overloads under a rule for which it lists nothing: their inputs are gathered, which is correct."""


def _ids(example: Example) -> str:
    shapes = [tuple(arg.shape) for arg in example.args if isinstance(arg, Tensor)]
    return f"{example.target}{shapes}".replace(" ", "")


@pytest.mark.parametrize("example", EXAMPLES, ids=_ids)
def test_every_strategy_of_a_rule_is_right(example: Example) -> None:
    op = one_op(example.target, example.args, example.kwargs, key=example.key)
    outers = frozenset({2} if example.key is None else ())  # numbers are drawn for whole units
    tried: set[Strategy] = set()
    for units in UNITS if example.target.overloadpacket in lowering._TABLE else UNITS[:2]:
        axis = AxisShares(name="data", units=units)
        for strategy in candidates(Op(op.node, axis, outers)):
            if (
                units == (1, 0) and strategy in tried
            ):  # of a batch of one, only what could not be cut otherwise
                continue
            if any(p == P and t.meta["val"].dtype == torch.bool for p, t in _pairs(op, strategy, axis)):
                continue  # a mask is never a sum
            _try(op, strategy, axis, example)
            tried.add(strategy)
    cut = [s for s in tried if any(isinstance(p, Shard) for p in (*s.inputs, *s.outputs))]
    assert cut or str(example.target) in NEVER_CUT or _lists_nothing(op), "no strategy cuts the example"


def _pairs(op: OneOp, strategy: Strategy, axis: AxisShares) -> Iterator[tuple[Placement, fx.Node]]:
    return zip(strategy.inputs, Op(op.node, axis).tensors, strict=True)


def _try(op: OneOp, strategy: Strategy, axis: AxisShares, example: Example) -> None:
    expected = op.expected
    if (
        example.key is not None
    ):  # numbers depend on which dim holds the samples, so the reference is one rank with the same strategy
        alone = AxisShares(name=axis.name, units=(axis.total,))
        expected = [parts[0] for parts in run_on_ranks(op, strategy, alone)]
    found = run_on_ranks(op, strategy, axis)
    for position, whole, parts in zip(op.positions, expected, found, strict=True):
        for rank, actual in enumerate(parts):
            if any(actual is earlier for earlier in parts[:rank]):
                continue
            where = f"{op.node.target} as {_text(strategy)} on shares {axis.units}: output {position} of rank {rank}"
            assert actual.shape == whole.shape, where
            if example.values and position not in example.absent:
                wrong = _difference(actual, whole, example.tolerance)
                assert not wrong, f"{where}: {wrong}"


def _difference(actual: Tensor, wanted: Tensor, tolerance: float) -> str:
    try:
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def _text(strategy: Strategy) -> str:
    return f"({', '.join(map(str, strategy.inputs))}) -> ({', '.join(map(str, strategy.outputs))})"


def _lists_nothing(op: OneOp) -> bool:
    axis = AxisShares(name="data", units=(1, 1))
    rule = base.find_rule(op.node.target)
    return rule is not None and not [s for s in rule(Op(op.node, axis)) if P not in s.inputs]


def test_every_rule_and_every_lowering_has_an_example() -> None:
    shown = {example.target for example in EXAMPLES} | {example.target.overloadpacket for example in EXAMPLES}
    # What islands and endings run is code of the user's: no example can name it.
    islands = {torch.ops.plait.island, torch.ops.plait.island_backward, torch.ops.plait.ending}
    entered = {*base._TABLE, *lowering._TABLE} - {"pointwise"} - islands
    assert not sorted(str(target) for target in entered - shown), "add an example to op_examples.py"


def test_an_op_without_a_rule_is_gathered() -> None:
    op = one_op(torch.ops.aten.linalg_lu_factor_ex.default, (torch.eye(6, dtype=torch.float64),))
    assert candidates(Op(op.node, AxisShares(name="data", units=(2, 1, 3)))) == [Strategy((R,), (R, R, R))]


@pytest.mark.parametrize(
    ("wrong", "args"),
    [
        (Strategy((Shard(0),), (Shard(1),)), (torch.ones(6, 6, dtype=torch.float64).cumsum(0),)),
        (Strategy((Shard(0),), (R,)), (torch.ones(6, dtype=torch.float64),)),
        (Strategy((P,), (P,)), (torch.ones(6, dtype=torch.float64),)),
    ],
    ids=str,
)
def test_a_wrong_strategy_is_found(wrong: Strategy, args: Any) -> None:
    example = Example(torch.ops.aten.exp.default, args)
    op = one_op(example.target, example.args)
    with pytest.raises(Exception, match="exp"):
        _try(op, wrong, AxisShares(name="data", units=(2, 1, 3)), example)
