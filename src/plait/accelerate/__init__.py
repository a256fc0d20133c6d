"""Accelerate's names: `from plait.accelerate import Accelerator` in a script that was written for Accelerate.

In: processes that torchrun, srun, mpirun or `plait.launch` started, one a rank; or one alone. Out: its calls, exact: a
rank's loss weighs what it is a mean of (one that is a sum is averaged, as there), no sample is repeated to make shares
equal, and metrics see each sample once.
As there, `batch_size` is that of one process unless `split_batches`. State is saved without pickles of objects.
"""

from plait.accelerate.accelerator import Accelerator
from plait.accelerate.functions import (
    DistributedType,
    find_executable_batch_size,
    set_seed,
    skip_first_batches,
)
from plait.accelerate.processes import PartialState
from plait.accelerate.settings import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)

__all__ = [
    "Accelerator",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "InitProcessGroupKwargs",
    "PartialState",
    "ProfileKwargs",
    "find_executable_batch_size",
    "set_seed",
    "skip_first_batches",
]
