"""Torch's own sharding rules, for ops that we have none for.

In: an op. Out: strategies of the kinds that we know (shards, replicas, plain sums) that torch's DTensor lists for one
mesh dim, or none. Only its table of rules for a single mesh dim is read: that is data about an op and its arguments,
and needs no mesh, no process group and no DTensor. A strategy is kept only if the op itself, run on fake shards, gives
shards of the shapes that the strategy promises, so an op whose arguments name sizes is left out.

A torch without the table (before 2.13) gives no strategies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from plait.program.place.rules.base import Op, P, Placement, R, Shard, Strategy
from plait.torch_private import pytree
from plait.torch_private.dtensor import described, kind_of, single_dim_rule


def dtensor_strategies(op: Op) -> list[Strategy]:
    """What torch's rule for an op gives; an empty list where it has none, or none that we can use."""
    function = _single_dim_rule(op.node.target)
    if function is None:
        return []
    try:
        rows = function(op.node.target, *_described(op))
    except Exception:
        return []  # a rule of torch that does not know these arguments; the op is then gathered, and told
    count = len(op.outputs)
    found: list[Strategy] = []
    for row in rows:
        placements = [_placement(entry) for entry in row]
        if len(placements) != count + len(op.tensors) or None in placements[count:]:
            continue
        outputs = [R if p is None and not op.outputs[i] else p for i, p in enumerate(placements[:count])]
        if None in outputs:
            continue
        strategy = Strategy(tuple(placements[count:]), tuple(outputs))  # type: ignore[arg-type]
        if strategy not in found and _is_plain(strategy) and _has_promised_shapes(op, strategy):
            found.append(strategy)
    return found


def _single_dim_rule(target: Any) -> Callable[..., Sequence[Sequence[Any]]] | None:
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return None  # its numbers would depend on the ranks
    return single_dim_rule(target)


def _described(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments with tensors as torch's rules see them."""

    def describe(leaf: Any) -> Any:
        return described(leaf.meta["val"]) if isinstance(leaf, fx.Node) else leaf

    args, kwargs = pytree.tree_map(describe, (tuple(op.node.args), dict(op.node.kwargs)))
    return args, kwargs


def _placement(entry: Any) -> Placement | None:
    """A placement of ours; None for kinds that we do not have (averages, masked sums, strided shards)."""
    kind = kind_of(entry)
    if kind == "shard":
        return Shard(int(entry.dim))
    if kind == "replicate":
        return R
    return P if kind == "sum" else None


def _is_plain(strategy: Strategy) -> bool:
    """Whether an empty share adds nothing: it is given zeros in place of the op."""
    cut = any(isinstance(p, Shard) for p in strategy.inputs)
    if not cut:
        return P in strategy.inputs
    return P not in strategy.inputs and R not in strategy.outputs


def _has_promised_shapes(op: Op, strategy: Strategy) -> bool:
    """Whether the op gives shards of the right shapes when it is run on shards of one unit."""
    shapes = [_unit(op, shape, p) for shape, p in zip(op.shapes, strategy.inputs, strict=True)]
    promised = [_unit(op, shape, p) for shape, p in zip(op.outputs, strategy.outputs, strict=True)]
    if None in shapes or None in promised:
        return False
    dtypes = [tensor.meta["val"].dtype for tensor in op.tensors]
    local = iter(
        torch.empty(shape or (), dtype=dtype, device="meta")
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )

    def replace(leaf: Any) -> Any:
        return next(local) if isinstance(leaf, fx.Node) else leaf

    args, kwargs = pytree.tree_map(replace, (tuple(op.node.args), dict(op.node.kwargs)))
    try:
        result = op.node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return False  # the op refuses shards
    values = [result] if isinstance(result, torch.Tensor) else list(result)
    pairs = zip(values, promised, strict=True)
    return all(not isinstance(value, torch.Tensor) or tuple(value.shape) == shape for value, shape in pairs)


def _unit(op: Op, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...] | None:
    """The shape of a shard of one unit; None where there is no such shard, or it is everything."""
    if not isinstance(placement, Shard) or not shape:
        return shape
    units = op.axis.total
    if placement.dim >= len(shape) or units < 2 or shape[placement.dim] == 0 or shape[placement.dim] % units:
        return None
    return (*shape[: placement.dim], shape[placement.dim] // units, *shape[placement.dim + 1 :])
