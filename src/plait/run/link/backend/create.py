"""Makes a group of `plait_shm` where torch asks for one.

In: torch's store, a rank. Out: a `ShmGroup`: through memory where all ranks are processes of this host, else through
memory within each host and over gloo between them. Nothing has a name in the file system: memory goes with its
processes.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import PlanError, RunError
from plait.run.link.backend.group import BACKEND, ShmGroup
from plait.run.link.backend.hosts import HostWays
from plait.run.link.backend.local import LocalWays
from plait.run.link.shm import core
from plait.run.link.shm.memory import Arena, host, is_suitable, open_arenas


def create_group(options: Any) -> dist.ProcessGroup:
    """Make a group as torch asks for it."""
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout = options.timeout
    own = Arena.create(1) if is_suitable() else None
    here = [host(), own.pid if own else 0, own.file if own else -1, core.compiled() is not None]
    told = [json.loads(word) for word in _exchange(store, "where", rank, size, json.dumps(here), timeout)]
    unable = [peer for peer, (_, pid, _, _) in enumerate(told) if not pid]
    if own is None or unable:
        raise RunError(
            f"{BACKEND} needs Linux on x86-64: ranks {', '.join(map(str, unable))} of the group cannot share memory.",
            fix="use gloo.",
        )
    hosts = [
        [peer for peer in range(size) if told[peer][0] == place]
        for place in dict.fromkeys(e[0] for e in told)
    ]
    here_too = next(ranks for ranks in hosts if rank in ranks)
    place = here_too.index(rank)
    arenas = open_arenas(own, place, [(told[peer][2], told[peer][1]) for peer in here_too], 1)
    _exchange(store, "open", rank, size, "1", timeout)
    names = [f"rank {(options.global_ranks_in_group or range(size))[peer]}" for peer in here_too]
    native = all(told[peer][3] for peer in here_too)
    local = LocalWays(place, arenas, names, timeout.total_seconds(), native=native)
    if len(hosts) == 1:
        return ShmGroup(rank, size, local)
    everyone, leaders = _gloo("all", store, rank, size, timeout), None
    if place == 0:
        leaders = _gloo("hosts", store, hosts.index(here_too), len(hosts), timeout)
    return ShmGroup(rank, size, HostWays(rank, hosts, local, leaders, everyone))


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


def _gloo(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    within = dist.PrefixStore(f"plait_shm/{name}", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(within, rank, size, timeout)


def _exchange(store: Any, what: str, rank: int, size: int, value: str, timeout: timedelta) -> list[str]:
    """What every rank has to say."""
    store.set(f"plait_shm/{what}/{rank}", value)
    keys = [f"plait_shm/{what}/{peer}" for peer in range(size)]
    store.wait(keys, timeout)
    return [store.get(key).decode() for key in keys]
