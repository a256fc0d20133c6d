"""Accelerate's groups of settings, with its names and defaults: what they mean here, or why they are refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

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


@dataclass
class InitProcessGroupKwargs:
    """How processes find each other. Has no effect: plait has its own way, and waits as long as others live."""

    backend: str | None = None
    init_method: str | None = None
    timeout: Any = None


@dataclass
class ProfileKwargs:
    """What `Accelerator.profile` gives to `torch.profiler.profile`."""

    activities: list[str] | None = None
    """"cpu", "cuda", ...; None: all."""
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Any = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    """Where each process writes profile_N.json."""

    @contextmanager
    def recorded(self, number: int) -> Iterator[torch.profiler.profile]:
        """What is done within it, by the process of that number."""
        kinds = [getattr(torch.profiler.ProfilerActivity, kind.upper()) for kind in self.activities or ()]
        plan: Any = torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None
        with torch.profiler.profile(
            activities=kinds or None,
            schedule=plan,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        ) as profiler:
            yield profiler
        if self.output_trace_dir is not None:
            folder = Path(self.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{number}.json"))
