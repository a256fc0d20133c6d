"""What Accelerate has beside its `Accelerator`."""

import gc
import os
import random
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial, wraps
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import UsageError
from plait.run.share_loader import ShareLoader
from plait.run.wire.tell import tell


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


def gather_object(own: Any) -> list[Any]:
    """Lists of all ranks, one after the other: of numbers, texts, tensors, and lists and dicts of them."""
    shares = tell(list(own)) if dist.is_initialized() else [list(own)]
    return [entry for share in shares for entry in share]


def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """The entries of that rank's list, on all ranks, in place."""
    if dist.is_initialized():
        objects[:] = tell(objects)[from_process]
    return objects


def is_of_tensors(tree: Any) -> bool:
    """Whether all that it holds are tensors."""
    if isinstance(tree, list | tuple):
        return all(map(is_of_tensors, tree))
    return all(map(is_of_tensors, tree.values())) if isinstance(tree, Mapping) else isinstance(tree, Tensor)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """The loader's next pass without its first batches."""
    if not isinstance(loader, ShareLoader):
        raise UsageError(
            "skip_first_batches takes a DataLoader that was prepared.", fix="call prepare first."
        )
    return loader.skipping(num_batches)


_NO_ROOM = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call `function(batch_size, ...)`, again with a smaller batch as long as memory does not suffice; a decorator."""
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @wraps(function)
    def fitting(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError) and not any(told in str(error) for told in _NO_ROOM):
                    raise
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        raise RuntimeError("No executable batch size found, reached zero.")

    return fitting


def device_of(cpu: bool) -> torch.device:
    """Where this rank computes."""
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
