"""The tensors that outlive a step on one rank: parameters, buffers, optimizer state.

In: a job. Out: the user's own module and optimizer on this rank's device, and both ways between them and a checkpoint.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from plait.job.job import Job
from plait.job.schedule import Schedule
from plait.run.checkpoint_state import (
    TrainingState,
    collect_model,
    collect_optimizer,
    restore_model,
    restore_optimizer,
)


class ModelState:
    """One rank's copy of what is trained."""

    def __init__(self, job: Job, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.job = job
        self.device = device
        self.dtype = dtype
        model = job.build_model()
        if model is job.model:  # the user's own instance stays as it was given
            model = copy.deepcopy(model)
        if dtype != torch.float32:
            model = model.to(dtype)
        self.model: nn.Module = model.to(device).train()
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.buffers: dict[str, Tensor] = dict(self.model.named_buffers())
        self.named = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        self.optimizer = job.build_optimizer(self.named)
        self.schedule = Schedule(job.schedule, self.optimizer)
        self.steps_done = 0

    def values(self) -> dict[str, Any]:
        """What instructions call these tensors."""
        named: dict[str, Any] = {f"parameter:{name}": p.detach() for name, p in self.parameters.items()}
        return named | {f"buffer:{name}": buffer for name, buffer in self.buffers.items()}

    def place(self, leaf: Tensor) -> Tensor:
        """A tensor of a batch on this rank's device, in its floating dtype where it has one."""
        return leaf.to(self.device, self.dtype if leaf.is_floating_point() else leaf.dtype, non_blocking=True)

    def to_checkpoint(self, extra: dict[str, Any]) -> TrainingState:
        """Everything that the next step depends on."""
        parameters, buffers, aliases, transient = collect_model(self.model)
        return TrainingState(
            step=self.steps_done,
            parameters=parameters,
            buffers=buffers,
            aliases=aliases,
            transient=transient,
            optimizer=collect_optimizer(self.optimizer, self.named),
            schedule=self.schedule.state_dict(),
            extra=extra,
        )

    def load(self, state: TrainingState) -> None:
        """Continue from a checkpoint, whatever plan wrote it."""
        restore_model(self.model, state)
        restore_optimizer(self.optimizer, self.named, state.optimizer)
        self.schedule.load_state_dict(state.schedule)
        self.steps_done = state.step
