"""Links through memory that all ranks of one host share: sums without sockets, in the order of ranks.

In: collectives on CPU tensors, best in memory that `buffer` gave. Out: results that are equal bit for bit on every
rank. Rank r of an axis adds up the r-th part of every rank's tensor and writes it back to all of them, so each byte
is read once and written once. Nothing runs in the background: a rank does its part when it starts a later collective
or waits for one. A wait gives the processor away, ends with an error when a peer's process is gone, and can be
interrupted. It is never used between hosts, with devices, or on processors that reorder stores (`share_memory` says
so and the caller falls back).
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective
from plait.run.links import Handle, Links, NoLinks, ProcessLinks
from plait.run.shared_memory import ARRIVED, DONE, PLACES, RING, Arena, Region, has_ended, host, is_suitable

_SMALL_BYTES = 1 << 15
"""Up to this size every rank adds up everything by itself: one meeting instead of two."""
_SPINS = 400
"""Looks before a waiting rank starts to sleep between looks."""
_LONGEST_SLEEP_S = 0.0005
_LOOK_FOR_PEERS_S = 0.5


@dataclass(slots=True)
class _Started:
    """A collective of which this rank's part may still have to be done."""

    number: int
    collective: Collective
    region: Region
    tensor: Tensor
    in_place: bool
    """Whether `tensor` lies in `region`."""
    is_done: bool = False
    outcome: Tensor | None = None


class _Axis:
    """The collectives of one rank with its peers on one axis, in the order in which all of them start them."""

    def __init__(self, arenas: Sequence[Arena], own: int, timeout_s: float) -> None:
        self._arenas = arenas
        self._own = own
        self._words = arenas[own].words
        self._others = [arena.words for index, arena in enumerate(arenas) if index != own]
        self._timeout_s = timeout_s
        self._count = 0
        self._queue: deque[_Started] = deque()
        self._buffers: dict[int, Region] = {}
        self._spare: list[tuple[int, Region]] = []

    def buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        region = self._arenas[self._own].extend(count * dtype.itemsize)
        tensor = region.tensor(count, dtype)
        self._buffers[tensor.data_ptr()] = region
        return tensor

    def start(self, collective: Collective, tensor: Tensor) -> Handle:
        number = self._count
        if number >= RING:
            self._wait(DONE, number - RING + 1)
        region = self._buffers.get(tensor.data_ptr())
        in_place = region is not None and tensor.is_contiguous()
        if region is None or not in_place:
            region = self._scratch(tensor)
        started = _Started(number, collective, region, tensor, in_place)
        words, place = self._words, PLACES + 2 * (number % RING)
        words[place], words[place + 1] = region.offset, region.size
        self._count = words[ARRIVED] = number + 1
        self._queue.append(started)
        self._progress()
        return _Meeting(self, started)

    def _scratch(self, tensor: Tensor) -> Region:
        """A region with a copy of `tensor`, used again once all have left the collective that had it."""
        needed = tensor.numel() * tensor.element_size()
        left = self._least(DONE)
        for index, (number, region) in enumerate(self._spare):
            if (
                number < left
                and region.size >= needed
                and region.size <= 2 * needed + mmap.ALLOCATIONGRANULARITY
            ):
                del self._spare[index]
                break
        else:
            region = self._arenas[self._own].extend(needed)
        region.tensor(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)
        return region

    def _least(self, word: int) -> int:
        return min((words[word] for words in self._others), default=self._count)

    def _progress(self) -> None:
        """Do this rank's part of every collective that all have started."""
        arrived = self._least(ARRIVED)
        while self._queue and self._queue[0].number < arrived:
            started = self._queue.popleft()
            self._do(started)
            started.is_done = True
            self._words[DONE] = started.number + 1

    def _do(self, started: _Started) -> None:
        tensor, place = started.tensor, PLACES + 2 * (started.number % RING)
        found = [a.region(a.words[place], a.words[place + 1]) for a in self._arenas]
        if started.collective.op == "all_gather":
            started.outcome = _joined(found, tensor, started.collective)
            return
        parts = [region.tensor(tensor.numel(), tensor.dtype) for region in found]
        if not started.in_place and tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            started.outcome = tensor.copy_(total.view(tensor.shape))
            return
        size = -(-tensor.numel() // len(parts))
        own = [part[self._own * size : (self._own + 1) * size] for part in parts]
        if own[0].numel() == 0:
            return
        torch.add(own[0], own[1], out=own[0])
        for part in own[2:]:
            own[0].add_(part)
        for part in own[1:]:
            part.copy_(own[0])

    def finish(self, started: _Started) -> Tensor:
        if not started.is_done:
            self._wait(ARRIVED, started.number + 1)
            self._progress()
        if started.outcome is None:
            self._wait(DONE, started.number + 1)
            if not started.in_place:
                tensor = started.tensor
                tensor.copy_(started.region.tensor(tensor.numel(), tensor.dtype).view(tensor.shape))
        if not started.in_place:
            self._spare.append((started.number, started.region))
        return started.outcome if started.outcome is not None else started.tensor

    def _wait(self, word: int, count: int) -> None:
        """Until every other rank's counter has reached `count`."""
        began = looked = 0.0
        spins = 0
        for index, arena in enumerate(self._arenas):
            if index == self._own:
                continue
            words = arena.words
            while words[word] < count:
                spins += 1
                if spins < _SPINS:
                    os.sched_yield()
                    self._progress()
                    continue
                time.sleep(min(_LONGEST_SLEEP_S, 1e-6 * (spins - _SPINS + 10)))
                self._progress()
                now = time.monotonic()
                began = began or now
                if now - looked > _LOOK_FOR_PEERS_S:
                    looked = now
                    self._look_for(index, now - began)

    def _look_for(self, index: int, waited_s: float) -> None:
        pid = self._arenas[index].pid
        if has_ended(pid):
            raise ConnectionError(f"the process of peer {index} (pid {pid}) is gone.")
        if waited_s > self._timeout_s:
            raise ConnectionError(f"peer {index} did not come within {self._timeout_s:.0f} s: timed out.")


class _Meeting:
    def __init__(self, axis: _Axis, started: _Started) -> None:
        self._axis, self._started = axis, started

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._axis.finish(self._started)


class SharedLinks:
    """Links of one rank to the ranks of its mesh, all of them processes of this host."""

    def __init__(self, axes: Mapping[str, _Axis]) -> None:
        self._axes = axes

    def start(self, collective: Collective, tensor: Tensor) -> Handle:
        """Begin a collective; the sum of a tensor that `buffer` gave is made in place."""
        return self._axes[collective.axis].start(collective, tensor)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """A tensor that travels along `axis` without being copied."""
        return self._axes[axis].buffer(count, dtype)


def links_between(
    mesh: Mesh, rank: int, device: torch.device, *, timeout_s: float, share: bool = True
) -> Links:
    """The fastest links of this rank to the others: shared memory on one host's processors, else torch.distributed."""
    if mesh.size == 1:
        return NoLinks()
    shared = share_memory(mesh, rank, timeout_s) if share and device.type == "cpu" else None
    return shared if shared is not None else ProcessLinks(mesh, rank)


def share_memory(mesh: Mesh, rank: int, timeout_s: float) -> SharedLinks | None:
    """Open each other's memory; None, on all ranks, where one of them cannot. They meet through torch.distributed."""
    own = {axis: _attempt(Arena.create) for axis, size in mesh.axes if size > 1} if is_suitable() else {}
    told = {axis: (arena.file, arena.pid) for axis, arena in own.items() if arena is not None}
    everybody: list[Any] = [None] * mesh.size
    dist.all_gather_object(everybody, (host(), told))
    axes: dict[str, _Axis | None] = {}
    for axis, arena in own.items():
        peers = mesh.group(rank, axis)
        near = arena is not None and all(
            everybody[peer][0] == host() and axis in everybody[peer][1] for peer in peers
        )
        axes[axis] = _attempt(lambda: _open(arena, axis, peers, rank, everybody, timeout_s)) if near else None  # noqa: B023
    agreed: list[Any] = [None] * mesh.size
    dist.all_gather_object(agreed, bool(axes) and None not in axes.values())
    return (
        SharedLinks({name: axis for name, axis in axes.items() if axis is not None}) if all(agreed) else None
    )


def _open(
    arena: Any, axis: str, peers: Sequence[int], rank: int, everybody: Sequence[Any], timeout_s: float
) -> _Axis:
    arenas = []
    for peer in peers:
        file, pid = everybody[peer][1][axis]
        arenas.append(arena if peer == rank else Arena(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), pid))
    return _Axis(arenas, peers.index(rank), timeout_s)


def _attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except OSError:
        return None


def _joined(regions: Sequence[Region], own: Tensor, collective: Collective) -> Tensor:
    pieces = []
    for region, extent in zip(regions, collective.extents, strict=True):
        shape = (*own.shape[: collective.dim], extent, *own.shape[collective.dim + 1 :])
        pieces.append(region.tensor(torch.Size(shape).numel(), own.dtype).view(shape))
    return torch.cat(pieces, collective.dim)
