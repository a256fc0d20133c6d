"""PipeDream written out in plain PyTorch: a list of all versions of the weights, from which every micro-batch picks.

In: a job in the order of its data, the stage of every parameter. Out: losses and weights. Micro-batches are taken one
after the other; nothing here knows of programs, ranks or messages. A round of m micro-batches on p stages begins and
ends flushed; in between stage s has computed p - 1 - s forwards ahead when the gradients of a micro-batch arrive, so
that micro-batch k sees the weights after max(0, k - (p - 1 - s)) updates of the round.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from plait.job.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What training step by step gave."""

    losses: tuple[float, ...]
    """By round: the mean over all its samples."""
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def written_out(
    job: Job, stage_of: Mapping[str, int], stages: int, rounds: int, *, vertical_sync: bool = False
) -> Written:
    """Train `rounds` rounds in float64; the job does not shuffle and has enough samples."""
    model = copy.deepcopy(job.build_model()).double().train()
    parameters = dict(model.named_parameters())
    optimizers = [
        job.build_optimizer([(name, p) for name, p in parameters.items() if stage_of[name] == stage])
        for stage in range(stages)
        if stage in stage_of.values()
    ]
    sizes = [job.batch // job.accumulate + (i < job.batch % job.accumulate) for i in range(job.accumulate)]
    losses, start = [], 0
    for _ in range(rounds):
        versions = [_copy_of(parameters)]
        total = weights = 0.0
        for number, size in enumerate(sizes):
            batch = _batch(job, start, size)
            start += size
            ahead = {name: stages - 1 - (0 if vertical_sync else stage) for name, stage in stage_of.items()}
            seen = {name: versions[max(0, number - ahead[name])][name] for name in parameters}
            loss, weight = _mean(job, model, seen, batch, size)
            gradients = torch.autograd.grad(loss, list(seen.values()), allow_unused=True)
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            versions.append(_copy_of(parameters))
            total, weights = total + float(loss.detach()) * weight, weights + weight
        losses.append(total / weights)
    weights_after = {name: parameter.detach() for name, parameter in parameters.items()}
    return Written(losses=tuple(losses), weights=weights_after, buffers=dict(model.named_buffers()))


def _copy_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}


def _batch(job: Job, start: int, size: int) -> Any:
    samples = [job.data[index] for index in range(start, start + size)]
    return pytree.tree_map(
        lambda *leaves: torch.stack([t.double() if t.is_floating_point() else t for t in leaves]), *samples
    )


def _mean(
    job: Job, model: nn.Module, seen: Mapping[str, Tensor], batch: Any, size: int
) -> tuple[Tensor, float]:
    """(the loss divided by the micro-batch's own weight, that weight)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(model, dict(seen), args, kwargs)

    found = job.objective_of(run, batch)
    if isinstance(found, tuple):
        return found[0] / found[1], float(found[1])
    return found, float(size)
