"""Links through MPI: collectives and messages by mpi4py, among processes that mpirun started.

In: collectives on CPU tensors. Out: results once they are waited for. MPI makes progress in its own calls, so little
happens beside the computation. A wait gives the processor away between two looks. Of dtypes that MPI does not know
(float16, bfloat16), sums are made in float32 and everything else travels as bytes.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from plait.errors import UsageError
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

_SPINS = 200
"""Looks before a waiting rank sleeps between looks."""
_LONGEST_SLEEP_S = 0.0005
"""Between two looks."""
_SHORT = (torch.float16, torch.bfloat16)
"""What MPI cannot add up."""
_HALO_TAG = 1
"""Of the edges of tensors; messages have others."""


_Started = tuple[Sequence[Any], Callable[[], Tensor]]
"""Requests of MPI, and what comes of them."""


class _Requests:
    """What MPI was asked for."""

    def __init__(
        self, requests: Sequence[Any], finish: Callable[[], Tensor], look: Callable[[float], None]
    ) -> None:
        """`look`: is told now and then for how long it is waited, and raises where that is in vain."""
        self._requests, self._finish, self._look = requests, finish, look

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        began_s = time.monotonic()
        for request in self._requests:
            looks = 0
            while not request.Test():
                looks += 1
                if looks < _SPINS:
                    os.sched_yield()
                else:
                    time.sleep(min(_LONGEST_SLEEP_S, 1e-6 * looks))
                    if looks % _SPINS == 0:
                        self._look(time.monotonic() - began_s)
        return self._finish()


class MpiLinks:
    """Links of one rank to the ranks of its mesh, each a task of mpirun."""

    takes_turns = False

    def __init__(
        self, mesh: Mesh, rank: int, timeout_s: float, lost: Callable[[int], Exception | None]
    ) -> None:
        """`lost`: why nothing more comes from a rank; None: it may. MPI itself would wait for ever."""
        self._timeout_s, self._lost = timeout_s, lost
        self._mpi = _started()
        world = self._mpi.COMM_WORLD
        if (world.rank, world.size) != (rank, mesh.size):
            raise UsageError(
                f"links.transport=mpi: task {world.rank} of {world.size} of MPI is rank {rank} of {mesh.size}.",
                fix=f"start one task a rank: mpirun -n {mesh.size} plait run ...",
            )
        self._mesh, self._rank, self._world = mesh, rank, world
        self._groups = {}
        for axes in axes_that_meet(mesh):
            group = mesh.group(rank, axes)
            self._groups[axes] = world.Split(group[0], group.index(rank))

    def _looking(self, what: str, others: Sequence[int]) -> Callable[[float], None]:
        """Who has to come, and for how long that is waited for."""

        def look(waited_s: float) -> None:
            for other in others:
                error = self._lost(other) if other != self._rank else None
                if error is not None:
                    raise ConnectionError(f"{what}: {error}")
            if waited_s > self._timeout_s:
                missing = ", ".join(str(other) for other in others if other != self._rank)
                raise ConnectionError(
                    f"{what} with rank {missing} did not end within {self._timeout_s:g} s: timed out."
                )

        return look

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective without waiting for it."""
        axes = meeting_axes(self._mesh, collective.axis)
        if not axes:
            return alone(collective, tensor, out)
        group = self._groups[axes]
        match collective.op:
            case "all_reduce":
                requests, finish = self._all_reduce(group, tensor)
            case "all_gather":
                requests, finish = self._all_gather(group, collective, tensor, out)
            case "reduce_scatter":
                requests, finish = self._reduce_scatter(group, collective, tensor)
            case _:
                requests, finish = self._halo(group, collective, tensor)
        look = self._looking(
            f"{collective.op} of {tensor.nbytes:,} bytes", self._mesh.group(self._rank, axes)
        )
        return _Requests(requests, finish, look)

    def _all_reduce(self, group: Any, tensor: Tensor) -> _Started:
        flat = _summable(tensor).contiguous().view(-1)
        request = group.Iallreduce(self._mpi.IN_PLACE, flat.numpy())
        same = flat.data_ptr() == tensor.data_ptr()
        return [request], lambda: tensor if same else tensor.copy_(flat.view(tensor.shape))

    def _all_gather(self, group: Any, collective: Collective, tensor: Tensor, out: Tensor | None) -> _Started:
        dim, extents = collective.dim, collective.extents
        front = tensor.movedim(dim, 0).contiguous()
        whole = front.new_empty((sum(extents), *front.shape[1:]))
        row = front[:1].nbytes if front.numel() else whole[:1].nbytes
        counts = [extent * row for extent in extents]
        request = group.Iallgatherv(_bytes(front), [_bytes(whole), counts])

        def finish() -> Tensor:
            if out is not None:
                return out.copy_(whole.view(out.shape))
            return whole.movedim(0, dim).contiguous()

        return [request], finish

    def _reduce_scatter(self, group: Any, collective: Collective, tensor: Tensor) -> _Started:
        dim, extents = collective.dim, collective.extents
        front = _summable(tensor).movedim(dim, 0).contiguous()
        piece = front.new_empty((extents[group.rank], *front.shape[1:]))
        row = front.shape[1:].numel()
        counts = [extent * row for extent in extents]
        request = group.Ireduce_scatter(front.view(-1).numpy(), piece.view(-1).numpy(), counts)

        return [request], lambda: piece.movedim(0, dim).to(tensor.dtype).contiguous()

    def _halo(self, group: Any, collective: Collective, tensor: Tensor) -> _Started:
        up, down = (edge.contiguous() for edge in edges(tensor, collective))
        own, requests = group.rank, []
        before = torch.empty_like(down) if own > 0 else None
        after = torch.empty_like(up) if own + 1 < group.size else None
        for peer, sent, room in ((own - 1, up, before), (own + 1, down, after)):
            if room is not None:
                requests += [
                    group.Irecv(_bytes(room), peer, _HALO_TAG),
                    group.Isend(_bytes(sent), peer, _HALO_TAG),
                ]
        joined = with_halo if collective.op == "halo" else with_halo_added
        return requests, lambda: joined(tensor, before, after, collective)

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Send a message without waiting for it."""
        peer = self._mesh.group(self._rank, send.axis)[send.to]
        if not flat.numel():
            return Finished(flat)
        request = self._world.Isend(_bytes(flat), peer, _tag(send.message, flat))
        return _Requests([request], lambda: flat, self._looking(f"sending {send.message}", [peer]))

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Make room for a message."""
        peer = self._mesh.group(self._rank, recv.axis)[recv.source]
        if not flat.numel():
            return Finished(flat)
        request = self._world.Irecv(_bytes(flat), peer, _tag(recv.message, flat))
        return _Requests([request], lambda: flat, self._looking(f"receiving {recv.message}", [peer]))

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Any memory will do."""
        return torch.zeros(count, dtype=dtype)

    def close(self) -> None:
        """All ranks have done what they wanted to: mpirun takes it amiss where nobody says so."""
        self._mpi.Finalize()


def _started() -> Any:
    """mpi4py's MPI, ready in this process."""
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    return MPI


def _tag(message: str, flat: Tensor) -> int:
    """A number that both sides make of a message's name and size."""
    return 2 + (crc32(f"{message}, {flat.numel()} bytes".encode()) & 0x3FFFFFFF)


def _summable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _SHORT else tensor.detach()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()
