"""Optimizers and schedulers of a script that step where gradients are complete."""

from typing import Any, Protocol

import torch


class Synchronizes(Protocol):
    """Who knows when gradients are complete."""

    sync_gradients: bool


class Optimizer:
    """Steps where gradients are complete; everything else is the optimizer's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Synchronizes) -> None:
        self.optimizer, self._accelerator = optimizer, accelerator

    def step(self, closure: Any = None) -> None:
        if self._accelerator.sync_gradients:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Scheduler:
    """Steps with the optimizer; as often as there are ranks where each has a whole batch, as Accelerate does."""

    def __init__(self, scheduler: Any, accelerator: Synchronizes, times: int) -> None:
        self.scheduler, self._accelerator, self._times = scheduler, accelerator, times

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._accelerator.sync_gradients:
            return
        for _ in range(self._times):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)
