"""Accelerate's `LocalSGD`: ranks train for themselves, and every so many steps their weights are averaged."""

from contextlib import ExitStack
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from plait.accelerate.accelerator import Accelerator
from plait.errors import UsageError
from plait.run.wrap import Wrapped


class LocalSGD:
    """A block within which a prepared model's gradients are each rank's own; call `step` after the optimizer's."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if not isinstance(model, Wrapped):
            raise UsageError("LocalSGD takes a model that was prepared.", fix="call prepare first.")
        self.enabled = enabled and accelerator.use_distributed
        self.model, self.local_sgd_steps, self.num_steps = model, local_sgd_steps, 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._stack.enter_context(self.model.alone())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        if self.enabled and error[0] is None:
            self._average()

    def step(self) -> None:
        """Count a step; weights are averaged where it is the last of so many."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())
