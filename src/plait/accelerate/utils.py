"""Accelerate's `accelerate.utils`, for scripts that import from there."""

from plait.accelerate.functions import DistributedType, broadcast_object_list, gather_object, set_seed
from plait.accelerate.settings import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)

__all__ = [
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradientAccumulationPlugin",
    "ProjectConfiguration",
    "broadcast_object_list",
    "gather_object",
    "set_seed",
]
