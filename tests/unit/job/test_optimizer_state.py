"""The state of an optimizer is found without memory, and is what a real step leaves behind."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from plait.job.updates.optimizer_state import Updated, optimizer_state
from plait.torch_private import pytree

TENSORS = [
    *(Updated(name=f"blocks.{i}.weight", shape=(8, 4), dtype=torch.float32) for i in range(5)),
    *(Updated(name=f"blocks.{i}.bias", shape=(8,), dtype=torch.float32) for i in range(5)),
    Updated(name="head", shape=(3, 8), dtype=torch.float64),
]


class Factored(torch.optim.Optimizer):
    """Keeps a row and a column for matrices, all of a vector, and a number for itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.shared = torch.zeros(1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[self.shared] = {"count": torch.zeros(2)}
        for group in self.param_groups:
            for p in group["params"]:
                sizes = p.shape if p.dim() == 2 else (p.numel(),)
                self.state[p] = {str(i): torch.zeros(size) for i, size in enumerate(sizes)}
                if p.grad.abs().max() < 0:  # looks at numbers, which fake tensors do not have
                    raise AssertionError


def in_groups(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Matrices with momentum, vectors without, the head not at all."""
    matrices = [p for name, p in named if name.endswith("weight")]
    vectors = [p for name, p in named if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": matrices, "momentum": 0.9}, {"params": vectors}]
    return torch.optim.SGD(groups, lr=0.1)


def of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda named: kind([p for _, p in named], **options)


@pytest.mark.parametrize(
    "build",
    [
        of(torch.optim.SGD, lr=0.1),
        of(torch.optim.SGD, lr=0.1, momentum=0.9),
        of(torch.optim.AdamW),
        of(torch.optim.Adagrad),
        of(torch.optim.RMSprop, centered=True, momentum=0.5),
        in_groups,
    ],
    ids=["sgd", "momentum", "adamw", "adagrad", "rmsprop", "groups"],
)
def test_state_is_that_of_a_real_step(build: Callable[..., torch.optim.Optimizer]) -> None:
    named = [(entry.name, nn.Parameter(torch.zeros(entry.shape, dtype=entry.dtype))) for entry in TENSORS]
    optimizer = build(named)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    leaves = [leaf for leaf in pytree.tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor)]
    found = optimizer_state(build, TENSORS)
    assert found.num_bytes == sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    assert found.optimizer == type(optimizer).__name__


def test_state_of_an_optimizer_of_the_users_own() -> None:
    """It looks at numbers, and keeps something that is no parameter's."""
    vector = [Updated(name="a", shape=(7,), dtype=torch.float32)]
    assert optimizer_state(of(Factored), vector).num_bytes == 8 + 4 * 7
    assert optimizer_state(of(Factored), []).optimizer == "none"
