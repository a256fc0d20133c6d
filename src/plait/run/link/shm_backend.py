"""Makes a group of `plait_shm` where torch asks for one.

In: torch's store, a rank. Out: a `ShmGroup` where all ranks are processes of this host that can open each other's
memory, else an error that says why. Nothing has a name in the file system: memory goes with its processes.
"""

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import PlanError, RunError
from plait.run.link import core
from plait.run.link.shared_memory import Arena, host, is_suitable
from plait.run.link.shm_group import BACKEND, ShmGroup


def create_group(options: Any) -> dist.ProcessGroup:
    """Make a group as torch asks for it."""
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout = options.timeout
    own = Arena.create(1) if is_suitable() else None
    here = [host(), own.pid if own else 0, own.file if own else -1, core.compiled() is not None]
    told = [json.loads(word) for word in _exchange(store, "where", rank, size, json.dumps(here), timeout)]
    if own is None or any(place != host() or not pid for place, pid, _, _ in told):
        raise RunError(
            f"{BACKEND} needs all {size} ranks on one Linux host; they are on {len({entry[0] for entry in told})}.",
            fix="use gloo between hosts.",
        )
    arenas = []
    for peer, (_, pid, file, _) in enumerate(told):
        if peer == rank:
            arenas.append(own)
        else:
            arenas.append(Arena(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), pid, 1))
    _exchange(store, "open", rank, size, "1", timeout)
    ranks = list(options.global_ranks_in_group or range(size))
    native = all(entry[3] for entry in told)
    return ShmGroup(rank, arenas, ranks, timeout.total_seconds(), native=native)


def empty(shape: Sequence[int], dtype: torch.dtype, group: Any) -> Tensor:
    """A tensor in memory that the group's ranks share."""
    if not isinstance(group, ShmGroup):
        raise PlanError(
            f"a tensor in shared memory needs a group of the backend {BACKEND}.",
            fix=f'call dist.init_process_group("{BACKEND}").',
        )
    return group.empty(shape, dtype)


def register() -> None:
    """Make the backend known to torch in this process, where `plait.shm` has not."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, lambda options, unused: create_group(options), extended_api=True, devices=["cpu"]
        )


def _exchange(store: Any, what: str, rank: int, size: int, value: str, timeout: timedelta) -> list[str]:
    """What every rank has to say."""
    store.set(f"plait_shm/{what}/{rank}", value)
    keys = [f"plait_shm/{what}/{peer}" for peer in range(size)]
    store.wait(keys, timeout)
    return [store.get(key).decode() for key in keys]
