"""Links through memory that all ranks of one host share: sums without sockets, in the order of ranks.

In: collectives on CPU tensors, best in memory that `buffer` gave. Out: results that are equal bit for bit on every
rank. Rank r of an axis adds up the r-th part of every rank's tensor and writes it back to all of them (to its own
alone, where it is a reduce_scatter), so each byte is read once and written once. Nothing runs in the background: a rank
does its part when it starts a later collective or waits for one. A wait gives the processor away, ends with an error
when a peer's process is gone, and can be interrupted. It is never used between hosts, with devices, or on processors
that reorder stores (`share_memory` says so and the caller falls back).
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective, Recv, Send
from plait.run.link import shared_parts
from plait.run.link.links import (
    Finished,
    Handle,
    alone,
    axes_that_meet,
    meeting_axes,
)
from plait.run.link.shared_memory import (
    ARRIVED,
    DONE,
    PLACE_WORDS,
    PLACES,
    RING,
    Arena,
    Region,
    has_ended,
    host,
    is_suitable,
)
from plait.run.link.shared_messages import Mail
from plait.run.wire.tell import tell

_SMALL_BYTES = 1 << 15
"""Up to this size every rank adds up everything by itself: one meeting instead of two."""
_SPINS = 400
"""Looks before a waiting rank starts to sleep between looks."""
_LONGEST_SLEEP_S = 0.0005
"""Between two looks: the least that gloo takes for a kilobyte between two processes of a host (0.5 to 0.9 ms)."""
_LOOK_FOR_PEERS_S = 0.5
"""Between two looks whether the others are still alive: a death is told within a second."""


@dataclass(slots=True)
class _Started:
    """A collective of which this rank's part may still have to be done."""

    number: int
    collective: Collective
    region: Region
    tensor: Tensor
    out: Tensor | None
    in_place: bool
    """Whether `tensor` lies in `region`."""
    is_done: bool = False
    outcome: Tensor | None = None
    """The result; None while it is made in the region by all."""

    @property
    def is_overwritten(self) -> bool:
        """Whether the memory that others read may be written to as soon as the result is there."""
        return self.in_place and self.collective.op == "reduce_scatter"


class _Axis:
    """The collectives of one rank with its peers on one axis, in the order in which all of them start them."""

    def __init__(
        self,
        arenas: Sequence[Arena],
        own: int,
        block: int,
        buffers: Mapping[int, Region],
        patience: "_Patience",
    ) -> None:
        self._arenas = arenas
        self._own = own
        self._blocks = [arena.block(block) for arena in arenas]
        self._words = self._blocks[own]
        self._others = [words for index, words in enumerate(self._blocks) if index != own]
        self._patience = patience
        self._count = 0
        self._queue: deque[_Started] = deque()
        self._buffers = buffers
        self._spare: list[tuple[int, Region]] = []

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None) -> Handle:
        number = self._count
        if number >= RING:
            self._wait(DONE, number - RING + 1)
            self._progress()  # this rank, too, must be done with the place that it now uses again
        region = self._buffers.get(tensor.untyped_storage().data_ptr())
        in_place = region is not None and tensor.is_contiguous() and collective.op not in ("halo", "halo_add")
        start = int(tensor.storage_offset()) * tensor.element_size() if in_place else 0
        if region is None or not in_place:
            region = self._scratch(collective, tensor)
        started = _Started(number, collective, region, tensor, out, in_place)
        words, place = self._words, PLACES + PLACE_WORDS * (number % RING)
        words[place], words[place + 1], words[place + 2] = region.offset, region.size, start
        self._count = words[ARRIVED] = number + 1
        self._queue.append(started)
        self._progress()
        return _Meeting(self, started)

    def _scratch(self, collective: Collective, tensor: Tensor) -> Region:
        """A region with a copy of what others read, used again once all have left the collective that had it."""
        parts = shared_parts.staged(tensor, collective)
        needed = sum(part.numel() for part in parts) * tensor.element_size()
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
        start = 0
        for part in parts:
            region.tensor(part.numel(), part.dtype, start).view(part.shape).copy_(part)
            start += part.numel() * part.element_size()
        return region

    def _least(self, word: int) -> int:
        return min((words[word] for words in self._others), default=self._count)

    def _progress(self) -> None:
        """Do this rank's part of every collective that all have started."""
        if not self._queue:
            return
        arrived = self._least(ARRIVED)
        while self._queue and self._queue[0].number < arrived:
            started = self._queue.popleft()
            self._do(started)
            started.is_done = True
            self._words[DONE] = started.number + 1

    def _do(self, started: _Started) -> None:
        tensor, collective, own = started.tensor, started.collective, self._own
        parts = self._parts(started)
        match collective.op:
            case "all_gather":
                started.outcome = shared_parts.joined(parts, tensor.shape, collective, started.out)
            case "reduce_scatter":
                started.outcome = shared_parts.sum_piece(
                    parts, tensor.shape, collective, own, started.in_place
                )
            case "all_reduce":
                if not started.in_place and tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
                    started.outcome = tensor.copy_(shared_parts.sum_of_all(parts).view(tensor.shape))
                else:
                    shared_parts.sum_for_all(parts, own)
            case _:
                started.outcome = shared_parts.between_neighbours(parts, tensor, collective, own)

    def _parts(self, started: _Started) -> list[Tensor]:
        """What every rank lets others read."""
        tensor, collective = started.tensor, started.collective
        counts = [tensor.numel()] * len(self._arenas)
        if collective.op == "all_gather":
            row = torch.Size((*tensor.shape[: collective.dim], *tensor.shape[collective.dim + 1 :])).numel()
            counts = [extent * row for extent in collective.extents]
        elif collective.op in ("halo", "halo_add"):
            edges = shared_parts.staged(tensor, collective)
            counts = [sum(edge.numel() for edge in edges)] * len(self._arenas)
        place = PLACES + PLACE_WORDS * (started.number % RING)
        found = []
        for arena, words, count in zip(self._arenas, self._blocks, counts, strict=True):
            region = arena.region(words[place], words[place + 1])
            found.append(region.tensor(count, tensor.dtype, words[place + 2]))
        return found

    def finish(self, started: _Started) -> Tensor:
        if not started.is_done:
            self._wait(ARRIVED, started.number + 1)
            self._progress()
        outcome = started.outcome
        if outcome is None or started.is_overwritten:
            self._wait(DONE, started.number + 1)
        if outcome is None:
            outcome = started.tensor
            if not started.in_place:
                count = outcome.numel()
                outcome.copy_(started.region.tensor(count, outcome.dtype).view(outcome.shape))
        if not started.in_place:
            self._spare.append((started.number, started.region))
        return outcome

    def _wait(self, word: int, count: int) -> None:
        """Until every other rank's counter has reached `count`."""
        for index, words in enumerate(self._blocks):
            if index != self._own and words[word] < count:
                self._patience.wait(lambda: words[word] >= count, self._arenas[index], f"peer {index}")  # noqa: B023

    progress = _progress


class _Patience:
    """Waits for other ranks, and meanwhile does this rank's part of everything that is under way."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.axes: list[_Axis] = []

    def wait(self, is_over: Callable[[], bool], arena: Arena, who: str) -> None:
        """Until `is_over`, or an error when the process that owns `arena` is gone or too late."""
        began = looked = 0.0
        spins = 0
        while not is_over():
            for axis in self.axes:
                axis.progress()
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(min(_LONGEST_SLEEP_S, 1e-6 * (spins - _SPINS + 10)))
            now = time.monotonic()
            began = began or now
            if now - looked > _LOOK_FOR_PEERS_S:
                looked = now
                if has_ended(arena.pid):
                    raise ConnectionError(f"the process of {who} (pid {arena.pid}) is gone.")
                if now - began > self._timeout_s:
                    raise ConnectionError(f"{who} did not come within {self._timeout_s:.0f} s: timed out.")


class _Meeting:
    def __init__(self, axis: _Axis, started: _Started) -> None:
        self._axis, self._started = axis, started

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._axis.finish(self._started)


class _Letter:
    """A message that is fetched when it is wanted."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch = fetch

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._fetch()


class SharedLinks:
    """Links of one rank to the ranks of its mesh, all of them processes of this host.

    Servers, who are beyond the mesh, have no collectives; `mail` reaches everybody.
    """

    takes_turns = False

    def __init__(self, mesh: Mesh, rank: int, arenas: Sequence[Arena], timeout_s: float) -> None:
        self._mesh = mesh
        self._rank = rank
        self._arenas = arenas
        self._own = arenas[rank]
        self._buffers: dict[int, Region] = {}
        self._axes: dict[str, _Axis] = {}
        self._patience = _Patience(timeout_s)
        meeting = axes_that_meet(mesh)
        num_blocks = len(meeting) + 1
        for index, axes in enumerate(meeting if rank < mesh.size else ()):
            ranks = mesh.group(rank, axes)
            peers = [arenas[peer] for peer in ranks]
            self._axes[axes] = _Axis(peers, ranks.index(rank), index, self._buffers, self._patience)
        self._patience.axes = list(self._axes.values())
        self.mail = Mail(arenas, rank, num_blocks - 1, self._until)

    def _until(self, is_over: Callable[[], bool], peer: int) -> None:
        self._patience.wait(is_over, self._arenas[peer], f"rank {peer}")

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Leave a message in memory where its receiver finds it."""
        self.mail.send(send.message, self._mesh.group(self._rank, send.axis)[send.to], flat)
        return Finished(flat)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Look for a message when it is needed."""
        source = self._mesh.group(self._rank, recv.axis)[recv.source]
        return _Letter(lambda: self.mail.receive(recv.message, source, flat))

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective; others read a tensor of `buffer` where it lies, and its sum is made in place."""
        axis = self._axes.get(collective.axis)
        if axis is None:
            axes = meeting_axes(self._mesh, collective.axis)
            if not axes:
                return alone(collective, tensor, out)
            axis = self._axes[collective.axis] = self._axes[axes]
        return axis.start(collective, tensor, out)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """A tensor that travels, along any axis, without being copied."""
        region = self._own.extend(count * dtype.itemsize)
        self._buffers[region.bytes.data_ptr()] = region
        return region.tensor(count, dtype)


def share_memory(
    mesh: Mesh, rank: int, timeout_s: float, servers: int = 0, first: int = 0
) -> SharedLinks | None:
    """Open each other's memory; None, on all ranks, where one of them cannot. They meet through torch.distributed.

    On several hosts, `mesh` and `rank` are those of one host, whose `first` rank is that of the run.
    """
    num_blocks = len(axes_that_meet(mesh)) + 1  # the last one is for messages
    own = _attempt(lambda: Arena.create(num_blocks)) if is_suitable() else None
    told_by_all = tell([host(), [own.file, own.pid] if own is not None else None])
    everybody = told_by_all[first : first + mesh.size + servers]
    arenas = None
    if own is not None and all(place == host() and told for place, told in everybody):
        arenas = _attempt(lambda: _open(own, rank, [told for _, told in everybody], num_blocks))
    agreed = tell(arenas is not None)
    return SharedLinks(mesh, rank, arenas, timeout_s) if all(agreed) and arenas is not None else None


def _open(own: Arena, rank: int, told: Sequence[tuple[int, int]], num_blocks: int) -> list[Arena]:
    return [
        own if peer == rank else Arena(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), pid, num_blocks)
        for peer, (file, pid) in enumerate(told)
    ]


def _attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except OSError:
        return None
