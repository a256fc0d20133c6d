"""Averaging written out in plain torch: workers as a list of models, each with its share of every batch.

In: a job, how many workers and steps. Out: what every worker, and the center, has after each step. Nothing of plait's
runtime is used but the order of samples.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.job.job import Job
from plait.job.order import shares
from plait.job.updates.schedules import schedule_of

State = dict[str, Tensor]


@dataclass(kw_only=True)
class Workers:
    """Models that train on their own."""

    job: Job
    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    center: State
    """What the first weights were, until somebody moves it."""
    velocity: State
    moving: list[State] = field(default_factory=list)
    """By worker: momentum of its own."""

    def batches(self, step: int) -> list[Any]:
        """What each worker gets of a step; None: nothing."""
        samples = list(self.job.data)
        order = self.job.order(len(samples))
        assert order is not None
        ids = order.at(step).ids.tolist()
        sizes, found, first = shares(len(ids), len(self.models)), [], 0
        for size in sizes:
            own = [samples[i] for i in ids[first : first + size]]
            columns = [torch.stack([torch.as_tensor(v) for v in column]) for column in zip(*own, strict=True)]
            found.append([c.double() if c.is_floating_point() else c for c in columns] or None)
            first += size
        return found

    def gradients(self, step: int) -> list[State | None]:
        """Of every worker's mean loss on its share."""
        found: list[State | None] = []
        assert self.job.loss is not None
        for model, batch in zip(self.models, self.batches(step), strict=True):
            if batch is None:
                found.append(None)
                continue
            names, parameters = zip(*model.named_parameters(), strict=True)
            loss = self.job.loss(model(batch[0]), batch[1])
            found.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
        return found

    def step(self, step: int) -> None:
        """One step of every worker by its own optimizer."""
        for index, gradients in enumerate(self.gradients(step)):
            if gradients is not None:
                self.update(index, step, gradients)

    def update(self, index: int, step: int, gradients: State) -> None:
        """One worker's optimizer step."""
        schedule_of(self.job.schedule, self.optimizers[index]).apply(self.optimizers[index], step)
        for name, parameter in self.models[index].named_parameters():
            parameter.grad = gradients[name]
        self.optimizers[index].step()

    def weights(self) -> list[State]:
        """Every worker's, copied."""
        return [{n: p.detach().clone() for n, p in model.named_parameters()} for model in self.models]

    def mean(self, names: list[str] | None = None) -> State:
        """Parameters and floating buffers, averaged."""
        states = [
            dict(m.named_parameters()) | {n: b for n, b in m.named_buffers() if b.is_floating_point()}
            for m in self.models
        ]
        return {
            name: torch.stack([state[name].detach() for state in states]).mean(0)
            for name in states[0]
            if names is None or name in names
        }

    @torch.no_grad()
    def take(self, values: State) -> None:
        """Give all workers these values."""
        for model in self.models:
            held = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, value in values.items():
                held[name].copy_(value)


def workers_of(job: Job, count: int) -> Workers:
    """`count` copies of the job's model in float64."""
    model = job.build_model().double().train()
    models = [copy.deepcopy(model) for _ in range(count)]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return Workers(
        job=job,
        models=models,
        optimizers=[job.build_optimizer(list(m.named_parameters())) for m in models],
        center={name: p.detach().clone() for name, p in model.named_parameters()},
        velocity=copy.deepcopy(zeros),
        moving=[copy.deepcopy(zeros) for _ in models],
    )


def outer_step(workers: Workers, names: list[str], lr: float, momentum: float) -> None:
    """DiLoCo: SGD with Nesterov momentum on how far the mean is from the center."""
    mean = workers.mean(names)
    outer = torch.optim.SGD(
        [nn.Parameter(workers.center[name]) for name in names], lr=lr, momentum=momentum, nesterov=True
    )
    for name, parameter in zip(names, outer.param_groups[0]["params"], strict=True):
        parameter.grad = workers.center[name] - mean[name]
        outer.state[parameter]["momentum_buffer"] = workers.velocity[name]
    outer.step()
    for name, parameter in zip(names, outer.param_groups[0]["params"], strict=True):
        workers.center[name] = parameter.detach().clone()
        workers.velocity[name] = outer.state[parameter]["momentum_buffer"].clone()
    workers.take({name: workers.center[name] for name in names})


def elastic_step(workers: Workers, step: int, *, lr: float, rho: float, momentum: float, meets: bool) -> None:
    """Lecture 004, eq. (1) and (2), all workers at once."""
    before = _own_steps(workers, step, lr, momentum)
    center = dict(workers.center)
    for model, own in zip(workers.models, before, strict=True):
        _draw(model, own, center, lr * rho * meets)
    for name in center if meets else ():
        apart = sum(rho * (own[name] - center[name]) for own in before)
        workers.center[name] = center[name] + lr * apart


def elastic_in_turn(
    workers: Workers, step: int, *, lr: float, rho: float, momentum: float, meets: bool
) -> None:
    """Lecture 004, algorithm 1: one worker after the other meets the center, which has moved meanwhile."""
    before = _own_steps(workers, step, lr, momentum)
    for model, own in zip(workers.models, before, strict=True) if meets else ():
        center = dict(workers.center)
        _draw(model, own, center, lr * rho)
        workers.center = {name: center[name] + lr * rho * (own[name] - center[name]) for name in center}


@torch.no_grad()
def _own_steps(workers: Workers, step: int, lr: float, momentum: float) -> list[State]:
    """A step of every worker by itself: v <- mu v - lr grad(W + mu v), W <- W + v; returns where they were."""
    before = workers.weights()
    for model, own, moving in zip(workers.models, before, workers.moving, strict=True):
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name] + momentum * moving[name])
    with torch.enable_grad():
        gradients = workers.gradients(step)
    for index, model in enumerate(workers.models):
        found, moving = gradients[index], workers.moving[index]
        for name, parameter in model.named_parameters():
            moving[name] = momentum * moving[name] - (lr * found[name] if found is not None else 0.0)
            parameter.copy_(before[index][name] + moving[name])
    return before


@torch.no_grad()
def _draw(model: nn.Module, own: State, center: State, strength: float) -> None:
    """The second half of eq. (1): by how far the weights were from the center before the step."""
    for name, parameter in model.named_parameters():
        parameter.sub_(strength * (own[name] - center[name]))
