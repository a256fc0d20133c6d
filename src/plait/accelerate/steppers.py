"""Optimizers and schedulers of a script that step where gradients are complete."""

from typing import Any, Protocol

import torch


class Synchronizes(Protocol):
    """Who knows when gradients are complete."""

    sync_gradients: bool


class Optimizer(torch.optim.Optimizer):
    """Steps where gradients are complete; everything else is the optimizer's own. Schedulers take it for one."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Synchronizes) -> None:
        self.optimizer, self._accelerator = optimizer, accelerator

    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, groups: setattr(self.optimizer, "param_groups", groups),
    )
    state = property(
        lambda self: self.optimizer.state, lambda self, state: setattr(self.optimizer, "state", state)
    )
    defaults = property(lambda self: self.optimizer.defaults)
    step_was_skipped = False
    """Only steps in fp16 are."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self._accelerator.sync_gradients:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return repr(self.optimizer)


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
