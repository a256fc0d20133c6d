"""What Accelerate has beside its `Accelerator`."""

import os
import random
from enum import StrEnum
from typing import Any

import numpy
import torch

from plait.errors import UsageError
from plait.run.own_loop import ShareLoader


class DistributedType(StrEnum):
    """How processes are connected, by Accelerate's names."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"
    TPU = "TPU"


def set_seed(seed: int, *unused: Any) -> None:
    """Seed torch, random and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """The loader's next pass without its first batches."""
    if not isinstance(loader, ShareLoader):
        raise UsageError(
            "skip_first_batches takes a DataLoader that was prepared.", fix="call prepare first."
        )
    return loader.skipping(num_batches)


def device_of(cpu: bool) -> torch.device:
    """Where this rank computes."""
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
