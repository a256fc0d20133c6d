"""Whether an optimizer may run on a part of what it updates: of a tensor, or of the tensors.

In: the job's own optimizer factory, on parameters of the model's names and shapes, the large ones made smaller. Out:
whether tensors must stay whole, or an error that says why that does not help. It is tried, not looked up: a part of
every tensor, or every other tensor, is trained beside the whole, and must agree; at the start, and with what counts
steps set forward to where a long run is, as some optimizers begin with another rule.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from plait.errors import PlaitError, PlanError
from plait.job.job import Job
from plait.job.updates.optimizers import kind_of
from plait.run.prepare.step_counters import StepCounters

_STEPS = 3
"""The first makes state, the second uses it, the third shows what both did; around a late step: before, at, after."""
_LATER = (8, 12, 25, 64, 1_000, 25_600)
"""Steps that are tried without those before them. Multiples of what a rule may be due every so often (2 to 512, 10,
100, 1,000), and beyond the warm-ups that are in use (1,000 of Distributed Shampoo)."""
_SHORT = 4
"""Extent of a dim, at most, where another tensor of the same shape is tried as it is."""
_MOST = 1 << 14
"""Elements of the others: more than the sizes from which optimizers use another rule (4,096 elements for 8-bit states,
128 rows and columns for factored ones), and milliseconds a step."""
_AS_THEY_ARE = 2
"""Tensors of a shape and a group that are tried in their size: every other of them may be left out."""

Shape = tuple[int, ...]
Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""A parameter, and what its twin is or has of it."""


def check_divisible(job: Job, shapes: Sequence[tuple[str, Shape]], plan: str, *, between: bool) -> bool:
    """Whether the job's optimizer needs whole tensors. Raises where it does and the plan cuts within tensors, or where
    it needs all of them; `between`: the plan can give each tensor to one rank."""
    kind, reason = _try(job, shapes, _cut)
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


def check_dense(job: Job, shapes: Sequence[tuple[str, Shape]], plan: str) -> None:
    """Raise where the job's optimizer fails on dense gradients, which is what a server gets."""
    kind, reason = _try(job, shapes, lambda optimizer, wholes: [])
    if reason is not None:
        raise PlanError(
            f"plan {plan} sends dense gradients to its server, but {kind} cannot use them: {reason}.",
            fix="use an optimizer for dense gradients (SGD, Adam, AdamW, ...), or --plan ddp.",
        )


def check_apart(job: Job, shapes: Sequence[tuple[str, Shape]]) -> None:
    """Raise where the job's optimizer cannot update some tensors without the others, as `memory.offload` does."""
    kind, reason = _try(job, shapes, _every_other)
    if reason is not None:
        raise PlanError(
            f"memory.offload updates parameters part by part, but {kind} cannot update some of them alone: {reason}.",
            fix="use an optimizer that treats tensors apart (SGD, Adam, AdamW, ...), or memory.offload=none.",
        )


def _try(job: Job, shapes: Sequence[tuple[str, Shape]], part: Callable[..., Pairs]) -> tuple[str, str | None]:
    """(optimizer, why it cannot); None: it can."""
    generator = torch.Generator().manual_seed(7)

    def made(shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    named = [(name, nn.Parameter(made(shape))) for name, shape in _sizes(job, shapes)]
    optimizer = job.build_optimizer(named)
    twin = job.build_optimizer([(name, nn.Parameter(p.detach().clone())) for name, p in named])
    wholes = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = part(twin, wholes)
    counters = StepCounters(optimizer), StepCounters(twin)

    def step() -> None:
        for whole in wholes:
            whole.grad = made(tuple(whole.shape))
        for whole, own in pairs:
            assert whole.grad is not None
            own.grad = whole.grad.reshape(-1)[: own.numel()].reshape(own.shape).clone()
        optimizer.step()
        twin.step()
        for one in counters:
            one.look()

    what = "elements of its tensor" if part is _cut else "tensors"
    for later in (0, *_LATER):
        if later and not all(one.set_forward(later - 1) for one in counters):
            break  # it counts nothing: all steps are alike
        try:
            for _ in range(_STEPS):
                step()
        except PlaitError:
            raise
        except Exception as error:
            if later:  # a table of steps that ends: nothing is known of what comes after it
                break
            return kind_of(optimizer), f"it fails: {type(error).__name__}: {error}"
        if not _agree(pairs):
            when = f" from some step on (seen at step {later:,})" if later else ""
            return kind_of(optimizer), f"an element's update depends on other {what}{when}"
    return kind_of(optimizer), None


def _agree(pairs: Pairs) -> bool:
    return all(
        torch.allclose(
            whole.detach().reshape(-1)[: own.numel()].reshape(own.shape), own.detach(),
            rtol=1e-9, atol=1e-12, equal_nan=True,
        )
        for whole, own in pairs
    )  # fmt: skip


def _sizes(job: Job, shapes: Sequence[tuple[str, Shape]]) -> list[tuple[str, Shape]]:
    """How large each parameter is tried: the first of every shape in a group as it is, up to a bound."""
    named = [(name, nn.Parameter(torch.zeros(_short(shape), dtype=torch.float64))) for name, shape in shapes]
    groups = {
        p: at for at, group in enumerate(job.build_optimizer(named).param_groups) for p in group["params"]
    }
    seen = Counter[tuple[int | None, Shape]]()
    found = []
    for (name, shape), (_, parameter) in zip(shapes, named, strict=True):
        kind = groups.get(parameter), shape
        seen[kind] += 1
        found.append((name, _bounded(shape) if seen[kind] <= _AS_THEY_ARE else _short(shape)))
    return found


def _short(shape: Shape) -> Shape:
    return tuple(min(extent, _SHORT) for extent in shape)


def _bounded(shape: Shape) -> Shape:
    """The shape with its longest dims halved until it is small enough."""
    extents = list(shape)
    while math.prod(extents) > _MOST:
        longest = extents.index(max(extents))
        extents[longest] = -(-extents[longest] // 2)
    return tuple(extents)


def _every_other(optimizer: torch.optim.Optimizer, wholes: Sequence[nn.Parameter]) -> Pairs:
    """Leave an optimizer every other parameter."""
    pairs: Pairs = []
    rest = iter(enumerate(wholes))
    for group in optimizer.param_groups:
        kept = [(whole, p) for p, (at, whole) in zip(group["params"], rest, strict=False) if at % 2 == 0]
        group["params"][:] = [p for _, p in kept]
        pairs += kept
    return pairs


def _cut(optimizer: torch.optim.Optimizer, wholes: Sequence[nn.Parameter]) -> Pairs:
    """Point an optimizer to about half of each of its parameters; an odd number, so that no block or row ends there."""
    parts = []
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            count = min(parameter.numel() // 2 | 1, parameter.numel())
            part = nn.Parameter(parameter.detach().reshape(-1)[:count].clone())
            held = optimizer.state.pop(parameter, {})
            optimizer.state[part] = {
                key: value.reshape(-1)[:count].clone()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
                else value
                for key, value in held.items()
            }
            if not optimizer.state[part]:
                del optimizer.state[part]
            group["params"][position] = part
            parts.append(part)
    return list(zip(wholes, parts, strict=True))
