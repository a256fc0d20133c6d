"""Accelerate's `accelerate.utils`, for scripts that import from there.

`is_NAME_available` is answered for every name: of a kind of device by torch, of a package by whether it is installed.
"""

import importlib.util
import re
from collections.abc import Callable

import torch

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
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)

__all__ = [
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather_object",
    "set_seed",
]


def __getattr__(name: str) -> Callable[..., bool]:
    asked = re.fullmatch(r"is_(\w+)_available", name)
    if asked is None:
        raise AttributeError(f"plait.accelerate.utils has no {name}: it is not known here")
    return lambda *unused: _is_available(asked[1])


def _is_available(what: str) -> bool:
    if what == "bf16":
        return True
    devices = getattr(torch, what, None) or getattr(torch.backends, what, None)
    if (asked := getattr(devices, "is_available", None)) is not None:
        return bool(asked())
    return importlib.util.find_spec(what) is not None
