"""A center on a rank of its own, to which workers are drawn.

In: contributions of workers: flat weights W, each with a strength a, the worker's learning rate times rho. Out: to the
worker, where the center was; and the center moved, center <- center + a (W - center). Of buffers the center takes the
worker's share in a mean, one over the number of workers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.program.serve.rule import Due
from plait.run.hold.averaging import tensors_of, views_of
from plait.run.link.wire import Head
from plait.run.serve.service import Contribution, Service
from plait.torch_private import foreach

STRENGTH_BYTES = 8
"""Of a message, before its weights."""


class Center:
    """A `Holder` of weights that move towards those of workers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._flats = service.own.averages
        self.num_parts = len(self._flats)

    def steps(self) -> int:
        """Steps of the job that are done: as many shares as there are workers make one."""
        workers = self._service.workers
        return self._service.start + sum(worker.shares for worker in workers) // len(workers)

    def give(self, index: int) -> Sequence[Tensor]:
        """The center, of a flat."""
        return tensors_of(self._flats[index], self._service.state)

    def completed(self, worker: int) -> None:
        """A worker's weights are there."""

    def is_ready(self, due: Due) -> bool:
        """There is nobody else to wait for."""
        return True

    def take(self, shard: int, head: Head, message: Tensor) -> None:
        """Never sent: there is one center."""
        raise AssertionError("one rank has all of the center")

    def apply(self, due: Due, pushed: Sequence[Contribution]) -> None:
        """Tell a worker where the center was, and move."""
        (rank,), (parts,) = due.workers, pushed
        for index, (head, message) in sorted(parts.items()):
            self._service.send_weights(rank, index, head)
            strength = float(message[:STRENGTH_BYTES].view(torch.float64))
            theirs = message[STRENGTH_BYTES:].view(self._flats[index].dtype)
            own = list(self.give(index))
            foreach.add_(own, foreach.sub(views_of(self._flats[index], theirs), own), alpha=strength)
            self._service.workers[rank].shares = head.shares
            self._service.reached = max(self._service.reached, head.step + 1)
