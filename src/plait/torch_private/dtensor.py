"""DTensor's table of sharding rules, read as data: no mesh, no process group, no DTensor is made.

Only a recent torch has the table (`op_single_dim_strategy_funcs`, seen in 2.13); one without it, or with another form
of it, has no rules.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def single_dim_rule(op: Any) -> Callable[..., Sequence[Sequence[Any]]] | None:
    """Torch's rule for an op on one mesh dim: a function of the op and its arguments that gives rows of placements."""
    try:
        from torch.distributed.tensor import DTensor

        table = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    except (ImportError, AttributeError):  # torch without distributed, or an older one
        return None
    entry = table.get(op)
    return getattr(entry, "func", entry)


def described(value: Tensor) -> Any:
    """A tensor as those rules see it."""
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    return TensorMeta(shape=value.shape, stride=value.stride(), dtype=value.dtype)


def kind_of(entry: Any) -> str | None:
    """`replicate`, `shard` or `sum`; None for an entry that is something else (averages, masked sums, strided)."""
    name = type(entry).__name__
    if name == "Replicate":
        return "replicate"
    if name in ("Shard", "_ShardingPlaceholder"):
        return "shard"
    return "sum" if name == "Partial" and entry.reduce_op == "sum" else None
