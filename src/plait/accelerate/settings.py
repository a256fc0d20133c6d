"""Accelerate's groups of settings, with its names and defaults: what they mean here, or why they are refused."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from plait.errors import UsageError


@dataclass
class ProjectConfiguration:
    """Where a script saves."""

    project_dir: str | Path | None = None
    """Of checkpoints that are numbered."""
    logging_dir: str | Path | None = None
    """Of loggers; the project's by default."""
    automatic_checkpoint_naming: bool = False
    """`save_state()` writes checkpoints/checkpoint_0, checkpoint_1, ... of the project."""
    total_limit: int | None = None
    """So many of these are kept, the newest."""
    iteration: int = 0
    """The next one's number."""
    save_on_each_node: bool = False
    """Has no effect: files of ranks have names of their own."""


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated."""

    num_steps: int | None = None
    """Passes to an optimizer step."""
    adjust_scheduler: bool = True
    """Has no effect: schedulers step with the optimizer."""
    sync_with_dataloader: bool = True
    """An optimizer step at the end of the data, however few passes it has."""
    sync_each_batch: bool = False
    """Has no effect: gradients travel when they are complete."""


@dataclass
class DataLoaderConfiguration:
    """How data is read."""

    split_batches: bool = False
    """A DataLoader's `batch_size` counts the samples of all ranks together."""
    dispatch_batches: bool | None = None
    """Refused where true: every rank reads its own share."""
    even_batches: bool = True
    """Has no effect: no sample is repeated to make shares equal."""
    use_seedable_sampler: bool = False
    """Has no effect: the order is the same on all ranks by itself."""
    data_seed: int | None = None
    """Has no effect beside the seed of torch."""
    non_blocking: bool = False
    """Has no effect: copies are where they can be."""
    use_stateful_dataloader: bool = False
    """Has no effect: a position is a number of batches, see `skip_first_batches`."""

    def __post_init__(self) -> None:
        if self.dispatch_batches:
            raise UsageError(
                "dispatch_batches=True is not known here.",
                fix="leave it out: every rank reads its own share.",
            )


class DDPCommunicationHookType(StrEnum):
    """What DistributedDataParallel makes of gradients on their way, by Accelerate's names."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DistributedDataParallelKwargs:
    """Options of DistributedDataParallel: parameters that a pass does not reach, graphs that change and buffers need no
    option here. Hooks, which change what is computed, are refused."""

    def __init__(
        self, comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO, **unused: Any
    ) -> None:
        if comm_hook != DDPCommunicationHookType.NO:
            raise UsageError(
                f"DistributedDataParallelKwargs(comm_hook={comm_hook!r}) is not known here.",
                fix="leave it out; plait's own jobs have --set sync.compress=bf16, fp16, topk or powersgd.",
            )
