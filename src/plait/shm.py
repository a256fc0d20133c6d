"""torch.distributed through memory that the processes of a host share.

    import plait.shm
    dist.init_process_group("plait_shm")

Importing it makes the backend `plait_shm` known to torch; where plait is installed, `import torch` does so by itself.
`empty` gives tensors that travel without a copy. It imports nothing else of plait before a group is made.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "plait_shm"

__all__ = ["BACKEND", "empty", "register"]


def register() -> None:
    """Make the backend known to torch in this process."""
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32, group: Any = None) -> torch.Tensor:
    """A tensor in memory that the group's ranks share; where all give such a one, it is summed where it lies."""
    found: torch.Tensor = import_module("plait.run.link.backend.create").empty(
        shape, dtype, group if group is not None else dist.group.WORLD
    )
    return found


def _create(options: Any, unused: Any) -> Any:
    return import_module("plait.run.link.backend.create").create_group(options)


register()
