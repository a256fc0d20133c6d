"""Averaged weights on one rank: of whatever shard of each parameter it holds.

In: the parameters and buffers of a rank after a step. Out: their averages, and the way to train's own place and back:
whoever assembles, runs or saves parameters does the same with averages while they are shown.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from plait.job.updates.average import Average


class Averages:
    """What an `AveragedModel` of torch's holds, for the parts that are here."""

    def __init__(
        self, rule: Average, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        self._rule = rule
        self._parameters, self._buffers = parameters, buffers
        self._take = rule.function
        self.count = 0
        """How often weights were taken."""
        self.tensors: dict[str, Tensor] = {}
        """By name, of parameters and buffers; empty before the first time."""

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Take the weights, where it is time to."""
        if not self._rule.is_due(step):
            return
        now = self._now()
        if self.count == 0:
            self.tensors = {name: tensor.clone() for name, tensor in now.items()}
        else:
            numbers = [name for name, buffer in self._buffers.items() if buffer.is_floating_point()]
            averaged = [*self._parameters, *(numbers if self._rule.buffers else ())]
            alike: dict[torch.dtype, list[str]] = {}
            for name in averaged:
                if self.tensors[name].numel():
                    alike.setdefault(self.tensors[name].dtype, []).append(name)
            for names in alike.values():
                self._take([self.tensors[n] for n in names], [now[n] for n in names], self.count)
            for name in now.keys() - set(averaged):
                self.tensors[name].copy_(now[name])
        self.count += 1

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The averages in the place of the weights and buffers, for as long as somebody looks."""
        if self.count == 0:
            yield
            return
        now = self._now()
        with torch.no_grad():
            kept = {name: tensor.clone() for name, tensor in now.items()}
            for name, tensor in now.items():
                tensor.copy_(self.tensors[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in now.items():
                    tensor.copy_(kept[name])

    def _now(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters.items()} | dict(self._buffers)
