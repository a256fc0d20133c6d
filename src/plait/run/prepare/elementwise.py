"""Whether an optimizer may run on a part of what it updates: of a tensor, or of the tensors.

In: the job's own optimizer factory, on tiny parameters of the model's names and numbers of dims. Out: whether tensors
must stay whole, or an error that says why that does not help. It is tried, not looked up: half of every tensor, or
every other tensor, is trained beside the whole, and must agree.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from plait.errors import PlaitError, PlanError
from plait.job.job import Job
from plait.job.updates.optimizers import kind_of

_STEPS = 3
"""The first makes state, the second uses it, the third shows what both did."""
_LONGEST = 4
"""Extent of a dim of the tiny parameters, at most."""

Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""A parameter, and what its twin is or has of it."""


def check_divisible(
    job: Job, shapes: Sequence[tuple[str, tuple[int, ...]]], plan: str, *, between: bool
) -> bool:
    """Whether the job's optimizer needs whole tensors. Raises where it does and the plan cuts within tensors, or where
    it needs all of them; `between`: the plan can give each tensor to one rank."""
    kind, reason = _try(job, shapes, _halve)
    if reason is None:
        return False
    fix = "use an elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, ...), or --plan ddp."
    if not between:
        raise PlanError(
            f"plan {plan} cuts tensors into parts, but {kind} cannot update parts: {reason}.", fix=fix
        )
    _, apart = _try(job, shapes, _every_other)
    if apart is not None:
        raise PlanError(
            f"plan {plan} gives tensors to several ranks, but {kind} cannot update some of them alone: {apart}.",
            fix=fix,
        )
    return True


def check_dense(job: Job, shapes: Sequence[tuple[str, tuple[int, ...]]], plan: str) -> None:
    """Raise where the job's optimizer fails on dense gradients, which is what a server gets."""
    kind, reason = _try(job, shapes, lambda optimizer, wholes: [])
    if reason is not None:
        raise PlanError(
            f"plan {plan} sends dense gradients to its server, but {kind} cannot use them: {reason}.",
            fix="use an optimizer for dense gradients (SGD, Adam, AdamW, ...), or --plan ddp.",
        )


def check_apart(job: Job, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Raise where the job's optimizer cannot update some tensors without the others, as `memory.offload` does."""
    kind, reason = _try(job, shapes, _every_other)
    if reason is not None:
        raise PlanError(
            f"memory.offload updates parameters part by part, but {kind} cannot update some of them alone: {reason}.",
            fix="use an optimizer that treats tensors apart (SGD, Adam, AdamW, ...), or memory.offload=none.",
        )


def _try(
    job: Job, shapes: Sequence[tuple[str, tuple[int, ...]]], part: Callable[..., Pairs]
) -> tuple[str, str | None]:
    """(optimizer, why it cannot); None: it can."""
    generator = torch.Generator().manual_seed(7)

    def tiny(shape: tuple[int, ...]) -> torch.Tensor:
        small = [min(extent, _LONGEST) for extent in shape]
        return torch.randn(small, generator=generator, dtype=torch.float64)

    named = [(name, nn.Parameter(tiny(shape))) for name, shape in shapes]
    optimizer = job.build_optimizer(named)
    twin = copy.deepcopy(optimizer)
    wholes = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = part(twin, wholes)
    try:
        for _ in range(_STEPS):
            for whole in wholes:
                whole.grad = tiny(tuple(whole.shape))
            for whole, own in pairs:
                assert whole.grad is not None
                own.grad = whole.grad.reshape(-1)[: own.numel()].reshape(own.shape).clone()
            optimizer.step()
            twin.step()
    except PlaitError:
        raise
    except Exception as error:
        return kind_of(optimizer), f"it fails: {type(error).__name__}: {error}"
    for whole, own in pairs:
        there = whole.detach().reshape(-1)[: own.numel()].reshape(own.shape)
        if not torch.allclose(there, own.detach(), rtol=1e-9, atol=1e-12):
            alone = "elements of its tensor" if part is _halve else "tensors"
            return kind_of(optimizer), f"an element's update depends on other {alone}"
    return kind_of(optimizer), None


def _every_other(optimizer: torch.optim.Optimizer, wholes: Sequence[nn.Parameter]) -> Pairs:
    """Leave an optimizer every other parameter."""
    pairs: Pairs = []
    rest = iter(enumerate(wholes))
    for group in optimizer.param_groups:
        kept = [(whole, p) for p, (at, whole) in zip(group["params"], rest, strict=False) if at % 2 == 0]
        group["params"][:] = [p for _, p in kept]
        pairs += kept
    return pairs


def _halve(optimizer: torch.optim.Optimizer, wholes: Sequence[nn.Parameter]) -> Pairs:
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
    return list(zip(wholes, halves, strict=True))
