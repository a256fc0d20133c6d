"""An optimizer's state between a checkpoint, which has whole tensors, and a rank that holds shards of them.

In: the state of one side, and what a rank holds. Out: that of the other side, under the user's names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.run.checkpoint.state import OptimizerState
from plait.run.hold.holding import Holding, ShardFetcher


def whole_optimizer(
    state: OptimizerState,
    holding: Holding,
    fetch: ShardFetcher,
    groups: Sequence[Sequence[str]],
    shapes: Mapping[str, torch.Size],
) -> OptimizerState:
    """The state of all ranks, who must all call it; `groups` are the parameters of each of the optimizer's groups."""
    layout = holding.layout
    own = {
        name: {
            key: ("shard", value.dtype) if holding.is_like(name, value) else ("value", value.cpu())
            for key, value in sorted(entries.items())
        }
        for name, entries in state.tensors.items()
    }
    known = (
        fetch.tell((own, state.values)) if layout.owners or layout.whole_tensors else [(own, state.values)]
    )
    kinds: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for told, numbers in known:
        kinds = told | kinds
        values = numbers | values
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in [name for names in groups for name in names if name in kinds]:
        for key, (kind, what) in kinds[name].items():
            if kind == "shard":
                mine = state.tensors.get(name, {}).get(key)
                shard = torch.empty(0, dtype=what, device=holding.device) if mine is None else mine
                tensors.setdefault(name, {})[key] = holding.assemble(name, shard, fetch)
            else:
                tensors.setdefault(name, {})[key] = what
    whole = [
        group | {"names": list(names), "shapes": [list(shapes[name]) for name in names]}
        for group, names in zip(state.groups, groups, strict=True)
    ]
    return replace(state, tensors=tensors, values=values, groups=whole)


def own_optimizer(
    state: OptimizerState, holding: Holding, shapes: Mapping[str, torch.Size]
) -> OptimizerState:
    """What a rank holds of a whole state."""
    layout, rank = holding.layout, holding.rank
    tensors = {
        name: {
            key: layout.take(name, value, rank).contiguous()
            if value.shape == shapes.get(name) and value.dim() > 0
            else value
            for key, value in entries.items()
        }
        for name, entries in state.tensors.items()
        if name in shapes and layout.is_updated(name, rank)
    }
    groups = []
    for group in state.groups:
        names = [name for name in group["names"] if layout.is_updated(name, rank)]
        held = [list(holding.parameters[name].shape) for name in names]
        groups.append(group | {"names": names, "shapes": held})
    return replace(state, tensors=tensors, groups=groups)
