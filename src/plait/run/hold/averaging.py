"""The weights of a worker that trains on its own, and how those of others are mixed in.

In: sums over all workers of flattened weights. Out: weights moved by the plan's rule, with n workers:

    mean      W <- sum / n
    take      W <- what the first one has
    outer     delta = center - sum / n;  v <- mu v + delta;  center <- center - lr (delta + mu v);  W <- center
    elastic   W <- W - eta rho (W' - center);  center <- center + eta rho (sum - n center)

where W' is what the worker had when the weights were summed and eta is the current learning rate of its first parameter
group. Centers are equal on all workers, bit for bit. It communicates only to show the mean to an evaluation or a
checkpoint, and then leaves the worker's own weights as they were.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.plan.plan import Plan
from plait.program.instructions import Flatten, Lookahead, Mix, Momentum
from plait.program.program import Bucket
from plait.program.value import Value
from plait.run.hold.state import ModelState
from plait.run.link.links import Links
from plait.torch_private import foreach

Sum = Callable[[Tensor], Tensor]
"""Adds a tensor up over all workers."""


class Averaging:
    """What one worker keeps for averages beside its model."""

    def __init__(self, state: ModelState, links: Links) -> None:
        self._state = state
        self._links = links
        self._flats: dict[Bucket, tuple[Tensor, list[Tensor]]] = {}
        self.center: dict[str, Tensor] = {}
        """Of diloco and easgd: by parameter, what workers are drawn to."""
        self.velocity: dict[str, Tensor] = {}
        """By parameter: diloco's outer momentum, or that of easgd's worker."""

    def anchor(self, *, center: bool) -> None:
        """Nothing moves yet; `center`: what workers are drawn to is where they are."""
        self.velocity = {name: torch.zeros_like(p) for name, p in self._state.named}
        if center:
            self.center = {name: p.detach().clone() for name, p in self._state.named}

    def execute(
        self,
        instruction: Flatten | Lookahead | Momentum | Mix,
        bucket: Bucket,
        plan: Plan,
        values: dict[Value, Any],
    ) -> None:
        """Do what an instruction says with a flat."""
        match instruction:
            case Flatten():
                values[instruction.writes[0]] = self.flatten(bucket)
            case Lookahead():
                self.look_ahead(bucket, plan.elastic.momentum)
            case Momentum():
                self.take_momentum(bucket)
            case Mix():
                self._mix(instruction, bucket, plan, values[instruction.reads[0]])

    def _mix(self, mix: Mix, bucket: Bucket, plan: Plan, total: Tensor) -> None:
        match mix.rule:
            case "mean":
                self.mean(bucket, total, plan.mesh.size)
            case "take":
                foreach.copy_(tensors_of(bucket, self._state), views_of(bucket, total))
            case "outer":
                self.outer(bucket, total, plan.mesh.size, plan.average.outer_lr, plan.average.outer_momentum)
            case "elastic" if plan.agreement.weights == "center":
                self.draw(bucket, total, plan.elastic.rho)
            case "elastic":
                self.elastic(bucket, total, plan.mesh.size, plan.elastic.rho)

    def flatten(self, bucket: Bucket) -> Tensor:
        """Copy tensors into their flat."""
        if bucket not in self._flats:
            assert bucket.axis is not None
            flat = self._links.buffer(bucket.num_elements, bucket.dtype, self._state.device, bucket.axis)
            self._flats[bucket] = flat, views_of(bucket, flat)
        flat, views = self._flats[bucket]
        foreach.copy_(views, tensors_of(bucket, self._state))
        return flat

    def look_ahead(self, bucket: Bucket, momentum: float) -> None:
        """Move weights to where momentum alone would bring them."""
        velocity = [self.velocity[name] for name in bucket.parameters]
        foreach.add_(tensors_of(bucket, self._state), velocity, alpha=momentum)

    def take_momentum(self, bucket: Bucket) -> None:
        """How far weights have come since they were flattened."""
        velocity = [self.velocity[name] for name in bucket.parameters]
        foreach.copy_(velocity, tensors_of(bucket, self._state))
        foreach.sub_(velocity, self._flats[bucket][1])

    def mean(self, bucket: Bucket, total: Tensor, workers: int) -> None:
        """Take the mean."""
        foreach.copy_(tensors_of(bucket, self._state), views_of(bucket, total.div_(workers)))

    def outer(self, bucket: Bucket, total: Tensor, workers: int, lr: float, momentum: float) -> None:
        """A step of the outer optimizer from the center towards the mean, and go there."""
        centers, velocities = self._kept(bucket)
        deltas = foreach.sub(centers, views_of(bucket, total.div_(workers)))
        foreach.mul_(velocities, momentum)
        foreach.add_(velocities, deltas)
        foreach.add_(deltas, velocities, alpha=momentum)
        foreach.sub_(centers, deltas, alpha=lr)
        foreach.copy_(tensors_of(bucket, self._state), centers)

    def elastic(self, bucket: Bucket, total: Tensor, workers: int, rho: float) -> None:
        """Draw the weights towards the center, and the center towards those of all workers."""
        centers, _ = self._kept(bucket)
        self._draw(bucket, centers, rho)
        shifts = foreach.sub(views_of(bucket, total), centers, alpha=workers)
        foreach.add_(centers, shifts, alpha=self.rate * rho)

    def draw(self, bucket: Bucket, center: Tensor, rho: float) -> None:
        """Draw the weights towards a center that another rank has."""
        self._draw(bucket, views_of(bucket, center), rho)

    def _draw(self, bucket: Bucket, centers: Sequence[Tensor], rho: float) -> None:
        apart = foreach.sub(self._flats[bucket][1], list(centers))
        foreach.sub_(tensors_of(bucket, self._state), apart, alpha=self.rate * rho)

    @property
    def rate(self) -> float:
        """The current learning rate."""
        return float(self._state.optimizer.param_groups[0]["lr"])

    def _kept(self, bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
        return [self.center[n] for n in bucket.parameters], [self.velocity[n] for n in bucket.parameters]

    @contextmanager
    @torch.no_grad()
    def shown(self, plan: Plan, add_up: Sum) -> Iterator[None]:
        """The model as all workers together have it: easgd's center, else their mean; buffers are means.

        All workers must ask at the same time; each has its own back afterwards.
        """
        if not plan.agreement.averages:
            yield
            return
        state, workers = self._state, plan.mesh.size
        own = [(name, p.detach()) for name, p in state.named]
        own += [(name, b) for name, b in state.buffers.items() if b.is_floating_point()]
        before = [tensor.clone() for _, tensor in own]
        for name, tensor in own:
            found = self.center.get(name) if plan.agreement.mix == "elastic" else None
            if found is None:
                found = add_up(tensor.clone()).to(tensor.device) / workers
            tensor.copy_(found)
        try:
            yield
        finally:
            for (_, tensor), kept in zip(own, before, strict=True):
                tensor.copy_(kept)


def views_of(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The tensors that a flat is made of, in it."""
    sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
    pieces: Sequence[Tensor] = torch.split(flat, sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, bucket.shapes, strict=True)]


def tensors_of(bucket: Bucket, state: ModelState) -> list[Tensor]:
    """The parameters, or buffers, that a flat is made of."""
    return [
        *(state.parameters[name].detach() for name in bucket.parameters),
        *(state.buffers[name] for name in bucket.buffers),
    ]
