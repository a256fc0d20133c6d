"""Accelerate's `accelerate.utils`, for scripts that import from there."""

from plait.accelerate.functions import (
    DistributedType,
    broadcast_object_list,
    find_executable_batch_size,
    gather_object,
    set_seed,
)
from plait.accelerate.settings import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)

__all__ = [
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradientAccumulationPlugin",
    "ProjectConfiguration",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather_object",
    "set_seed",
]
