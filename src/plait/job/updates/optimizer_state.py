"""What an optimizer keeps from step to step, found by one step on fake tensors.

Goes in: a function that builds the user's optimizer, and the names, shapes and dtypes of what it updates. Comes out:
bytes, or the state by name. Any optimizer of the user's is counted as it is; nothing is allocated and no number is
computed. One that looks at numbers stops there: state that it would have made afterwards is not seen.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.torch_private import pytree
from plait.torch_private.fake import FakeTensorMode

Builder = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""As `Job.build_optimizer`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """One tensor that an optimizer updates."""

    name: str
    """The parameter's."""
    shape: tuple[int, ...]
    """Of the parameter, or of the shard of it that is updated."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the tensor itself."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """What was found."""

    optimizer: str
    """The name of its class; `none` where there is nothing to update."""
    num_bytes: int
    """Kept from step to step."""


def optimizer_state(build: Builder, tensors: Sequence[Updated]) -> OptimizerState:
    """The state after a step. Tensors of one group, shape and dtype have equal state: one of each is stepped."""
    if not tensors:
        return OptimizerState(optimizer="none", num_bytes=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer, like = _stepped(build, tensors)
        count: Counter[Any] = Counter(like.values())
        others = like.keys() - count.keys()
        found = sum(
            count.get(key, 1) * _num_bytes(kept)
            for key, kept in dict(optimizer.state).items()
            if key not in others  # of tensors that are like one that was stepped
        )
    return OptimizerState(optimizer=type(optimizer).__name__, num_bytes=found)


def kept_by_name(build: Builder, tensors: Sequence[Updated]) -> dict[str, dict[str, Any]]:
    """What is kept of each tensor, as fake tensors and numbers; nothing of those that the step did not come to."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer, like = _stepped(build, tensors)
        state = dict(optimizer.state)
        names = zip(tensors, like.values(), strict=True)
        return {entry.name: dict(state[first]) for entry, first in names if first in state}


def _stepped(
    build: Builder, tensors: Sequence[Updated]
) -> tuple[torch.optim.Optimizer, dict[nn.Parameter, nn.Parameter]]:
    """The optimizer after a step, and for each tensor, in their order, the one that was stepped in its place."""
    named = [(entry.name, nn.Parameter(torch.empty(entry.shape, dtype=entry.dtype))) for entry in tensors]
    like = {parameter: parameter for _, parameter in named}
    optimizer = build(named)
    for group in optimizer.param_groups:
        alike: dict[tuple[torch.Size, torch.dtype], nn.Parameter] = {}
        for parameter in group["params"]:
            like[parameter] = alike.setdefault((parameter.shape, parameter.dtype), parameter)
        group["params"] = list(alike.values())
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    with suppress(
        Exception
    ):  # state is made before numbers are looked at; an error is told when it really steps
        optimizer.step()
    return optimizer, like


def _num_bytes(kept: Any) -> int:
    leaves = (leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)
