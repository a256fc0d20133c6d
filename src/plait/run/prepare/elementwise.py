"""Whether an optimizer may run on parts of tensors: only where an element's update depends on that element alone.

In: the job's own optimizer factory, on tiny parameters of the model's names and numbers of dims. Out: nothing, or an
error that says why. It is tried, not looked up: half of every tensor is trained beside the whole, and must agree.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from plait.errors import PlaitError, PlanError
from plait.job.job import Job
from plait.job.updates.optimizers import kind_of

_STEPS = 3
"""The first makes state, the second uses it, the third shows what both did."""
_LONGEST = 4
"""Extent of a dim of the tiny parameters, at most."""


def check_elementwise(job: Job, shapes: Sequence[tuple[str, tuple[int, ...]]], plan: str) -> None:
    """Raise where the job's optimizer does something else on half of a tensor than on the whole of it."""
    generator = torch.Generator().manual_seed(7)

    def tiny(shape: tuple[int, ...]) -> torch.Tensor:
        small = [min(extent, _LONGEST) for extent in shape]
        return torch.randn(small, generator=generator, dtype=torch.float64)

    named = [(name, nn.Parameter(tiny(shape))) for name, shape in shapes]
    optimizer = job.build_optimizer(named)
    twin = copy.deepcopy(optimizer)
    halves = _halve(twin)
    wholes = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        for _ in range(_STEPS):
            for whole, half in zip(wholes, halves, strict=True):
                whole.grad = tiny(tuple(whole.shape))
                half.grad = whole.grad.reshape(-1)[: half.numel()].clone()
            optimizer.step()
            twin.step()
        differs = next(
            (
                i
                for i, (whole, half) in enumerate(zip(wholes, halves, strict=True))
                if not torch.allclose(
                    whole.detach().reshape(-1)[: half.numel()], half.detach(), rtol=1e-9, atol=1e-12
                )
            ),
            None,
        )
        reason = None if differs is None else "an element's update depends on other elements of its tensor"
    except PlaitError:
        raise
    except Exception as error:
        reason = f"it fails on a part of a tensor: {type(error).__name__}: {error}"
    if reason is not None:
        kind = kind_of(optimizer)
        raise PlanError(
            f"plan {plan} cuts tensors into parts, but {kind} cannot update parts: {reason}.",
            fix="use an elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, ...), or --plan ddp.",
        )


def _halve(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Point an optimizer to the first half of each of its parameters."""
    halves = []
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            count = -(-parameter.numel() // 2)
            half = nn.Parameter(parameter.detach().reshape(-1)[:count].clone())
            held = optimizer.state.pop(parameter, {})
            optimizer.state[half] = {
                key: value.reshape(-1)[:count].clone()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
                else value
                for key, value in held.items()
            }
            if not optimizer.state[half]:
                del optimizer.state[half]
            group["params"][position] = half
            halves.append(half)
    return halves
