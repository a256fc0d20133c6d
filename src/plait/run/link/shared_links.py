"""Links through memory that all ranks of one host share: sums without sockets, in the order of ranks.

In: collectives on CPU tensors, best in memory that `buffer` gave. Out: results that are equal bit for bit on every
rank. It is the core of `plait_shm` (`meeting`, `collectives`), with one group a choice of axes. Nothing runs in the
background: a rank does its part when it starts a later collective or waits for something. A wait gives the processor
away, ends with an error when a peer's process is gone, and can be interrupted. It is never used between hosts, with
devices, or on processors that reorder stores (`share_memory` says so and the caller falls back).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective, Recv, Send
from plait.run.link.links import (
    Finished,
    Handle,
    alone,
    axes_that_meet,
    edges,
    meeting_axes,
    with_halo,
    with_halo_added,
)
from plait.run.link.shm import core
from plait.run.link.shm.bell import Bells, look_at
from plait.run.link.shm.collectives import Collectives
from plait.run.link.shm.meeting import Meeting
from plait.run.link.shm.memory import Arena, Region, flat_of, host, is_suitable, open_arenas
from plait.run.link.shm.messages import Mail
from plait.run.link.shm.task import Task
from plait.run.wire.tell import tell


class _Pending:
    """Something under way, which is finished when it is wanted."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._finish()


class SharedLinks:
    """Links of one rank to the ranks of its mesh, all of them processes of this host.

    Servers, who are beyond the mesh, have no collectives; `mail` reaches everybody.
    """

    takes_turns = False

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        arenas: Sequence[Arena],
        timeout_s: float,
        *,
        native: bool,
        first: int = 0,
        thread: int | None = None,
        buffers: dict[int, Region] | None = None,
    ) -> None:
        """`first`: the number in the run of the mesh's first rank.

        `thread`: the number of the thread beside the computation that these links are for, and `buffers` those of the
        thread before it. It has meetings of its own and never spins, and a gather ends when others have read this
        rank's part: the computation, which is in no meeting, may change it then.
        """
        self._mesh = mesh
        self._rank = rank
        self._arenas = arenas
        self._own = arenas[rank]
        self._timeout_s = timeout_s
        self._native, self._first, self._thread = native, first, thread
        self._names = [f"rank {first + other}" for other in range(len(arenas))]
        self._buffers = buffers if buffers is not None else {}
        self._bells = Bells([arena.bell for arena in arenas], rank, native=native)
        self._axes: dict[str, Collectives] = {}
        meeting = axes_that_meet(mesh) if rank < mesh.size else ()
        for index, axes in enumerate(meeting, (thread or 0) * len(meeting)):
            self._axes[axes] = self._meet(mesh.group(rank, axes), index, native)
        self._meetings = [axis.meeting for axis in self._axes.values()]
        self.mail = Mail(arenas, rank, self._bells, self._until)

    def _meet(self, ranks: Sequence[int], index: int, native: bool) -> Collectives:
        peers, own = [self._arenas[peer] for peer in ranks], list(ranks).index(self._rank)
        headers, slots = zip(*(arena.meeting(index) for arena in peers), strict=True)
        beside = self._thread is not None
        bells = [arena.bell for arena in peers]
        made = core.make_core(headers, bells, own, native=native, spins=not beside)
        names, pids = [self._names[peer] for peer in ranks], [arena.pid for arena in peers]
        meeting = Meeting(made, slots, own, names, pids, self._timeout_s)
        return Collectives(meeting, peers, self._buffers, settles=beside)

    def for_next_thread(self) -> "SharedLinks":
        """Links of another thread through the same memory; `share_memory` was told that there are so many."""
        assert self._thread is not None, "these links are the rank's own"
        return SharedLinks(
            self._mesh, self._rank, self._arenas, self._timeout_s, native=self._native, first=self._first,
            thread=self._thread + 1, buffers=self._buffers,
        )  # fmt: skip

    def _until(self, is_over: Callable[[], bool], peer: int, what: str) -> None:
        """Wait for a rank, and meanwhile do this rank's part of everything that is under way."""
        look = look_at(self._arenas, self._names, (peer,), what, self._timeout_s)
        self._bells.until(lambda: self._progress() or is_over(), look)

    def _finish(self, meeting: Meeting, task: Task) -> None:
        """Wait for a collective; alike."""
        if any(not other.is_idle for other in self._meetings if other is not meeting):
            self._bells.until(lambda: self._progress() or task.is_done, lambda _: meeting.look())
        else:
            meeting.finish(task)

    def _progress(self) -> bool:
        for meeting in self._meetings:
            if not meeting.is_idle:
                meeting.progress()
        return False

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Leave a message in memory where its receiver finds it."""
        self.mail.send(send.message, self._mesh.group(self._rank, send.axis)[send.to], flat)
        return Finished(flat)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Look for a message when it is needed."""
        source = self._mesh.group(self._rank, recv.axis)[recv.source]
        return _Pending(lambda: self.mail.receive(recv.message, source, flat))

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective; others read a tensor of `buffer` where it lies, and its sum is made in place."""
        axis = self._axes.get(collective.axis)
        if axis is None:
            axes = meeting_axes(self._mesh, collective.axis)
            if not axes:
                return alone(collective, tensor, out)
            axis = self._axes[collective.axis] = self._axes[axes]
        task, outcome = self._started(axis, collective, tensor, out)
        meeting = axis.meeting
        meeting.progress()

        def finish() -> Tensor:
            if not task.is_done:
                self._finish(meeting, task)
            return outcome()

        return _Pending(finish)

    def _started(
        self, axis: Collectives, collective: Collective, tensor: Tensor, out: Tensor | None
    ) -> tuple[Task, Callable[[], Tensor]]:
        """A task, and what comes of it."""
        own = axis.meeting.own
        match collective.op:
            case "all_reduce":
                flat = flat_of(tensor)
                if flat.data_ptr() == tensor.data_ptr():
                    return axis.all_reduce(flat), lambda: tensor
                return axis.all_reduce(flat), lambda: tensor.copy_(flat.view(tensor.shape))
            case "all_gather":
                return _all_gather(axis, collective, tensor, out)
            case "reduce_scatter":
                front = tensor.movedim(collective.dim, 0)
                is_placed = tensor.untyped_storage().data_ptr() in self._buffers and tensor.is_contiguous()
                whole = front.contiguous()
                pieces = torch.split(whole, list(collective.extents))
                piece = pieces[own] if is_placed and collective.dim == 0 else torch.empty_like(pieces[own])
                task = axis.reduce_scatter(
                    piece.view(-1), [part.view(-1) for part in pieces], whole=whole.view(-1)
                )
                return task, lambda: piece.movedim(0, collective.dim).contiguous()
        up, down = (edge.contiguous() for edge in edges(tensor, collective))
        before, after = torch.empty_like(down), torch.empty_like(up)
        task = axis.halo(collective.op, *(edge.view(-1) for edge in (up, down, before, after)))
        joined = with_halo if collective.op == "halo" else with_halo_added
        first = before if own > 0 else None
        last = after if own + 1 < axis.meeting.ranks else None
        return task, lambda: joined(tensor, first, last, collective)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """A tensor that travels, along any axis, without being copied."""
        region = self._own.extend(count * dtype.itemsize)
        self._buffers[region.bytes.data_ptr()] = region
        return region.tensor(count, dtype)


def _all_gather(
    axis: Collectives, collective: Collective, tensor: Tensor, out: Tensor | None
) -> tuple[Task, Callable[[], Tensor]]:
    """Pieces of any extents, side by side; along another dim than the first they are joined afterwards."""
    dim, extents = collective.dim, list(collective.extents)
    flat = flat_of(tensor)
    row = torch.Size((*tensor.shape[:dim], *tensor.shape[dim + 1 :])).numel()
    whole = out.view(-1) if out is not None else tensor.new_empty(sum(extents) * row)
    pieces = torch.split(whole, [extent * row for extent in extents])
    sizes = tuple(piece.numel() * piece.element_size() for piece in pieces)
    task = axis.all_gather(pieces, flat, sizes=sizes)

    def joined() -> Tensor:
        if out is not None:
            return out
        shapes = [(*tensor.shape[:dim], extent, *tensor.shape[dim + 1 :]) for extent in extents]
        if dim == 0:
            return whole.view(sum(extents), *tensor.shape[1:])
        return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], dim)

    return task, joined


def share_memory(
    mesh: Mesh, rank: int, timeout_s: float, servers: int = 0, first: int = 0, threads: int = 0
) -> SharedLinks | None:
    """Open each other's memory; None, on all ranks, where one of them cannot. They meet through torch.distributed.

    On several hosts, `mesh` and `rank` are those of one host, whose `first` rank is that of the run. `threads`: how
    many beside the computation will have links through it; then these are the first one's.
    """
    count = len(axes_that_meet(mesh)) * max(1, threads)
    own = _attempt(lambda: Arena.create(count)) if is_suitable() else None
    told_by_all = tell(
        [host(), [own.file, own.pid] if own is not None else None, core.compiled() is not None]
    )
    everybody = told_by_all[first : first + mesh.size + servers]
    arenas = None
    if own is not None and all(place == host() and told for place, told, _ in everybody):
        arenas = _attempt(lambda: open_arenas(own, rank, [told for _, told, _ in everybody], count))
    native = all(has_core for _, _, has_core in everybody)
    agreed = tell(arenas is not None)
    if arenas is None or not all(agreed):
        return None
    return SharedLinks(
        mesh, rank, arenas, timeout_s, native=native, first=first, thread=0 if threads else None
    )


def _attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except OSError:
        return None
