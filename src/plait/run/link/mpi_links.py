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


class _Requests:
    """What MPI was asked for."""

    def __init__(self, requests: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._requests, self._finish = requests, finish

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        for request in self._requests:
            looks = 0
            while not request.Test():
                looks += 1
                if looks < _SPINS:
                    os.sched_yield()
                else:
                    time.sleep(min(_LONGEST_SLEEP_S, 1e-6 * looks))
        return self._finish()


class MpiLinks:
    """Links of one rank to the ranks of its mesh, each a task of mpirun."""

    takes_turns = False

    def __init__(self, mesh: Mesh, rank: int) -> None:
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

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective without waiting for it."""
        axes = meeting_axes(self._mesh, collective.axis)
        if not axes:
            return alone(collective, tensor, out)
        group = self._groups[axes]
        match collective.op:
            case "all_reduce":
                return self._all_reduce(group, tensor)
            case "all_gather":
                return self._all_gather(group, collective, tensor, out)
            case "reduce_scatter":
                return self._reduce_scatter(group, collective, tensor)
        return self._halo(group, collective, tensor)

    def _all_reduce(self, group: Any, tensor: Tensor) -> Handle:
        flat = _summable(tensor).contiguous().view(-1)
        request = group.Iallreduce(self._mpi.IN_PLACE, flat.numpy())
        same = flat.data_ptr() == tensor.data_ptr()
        return _Requests([request], lambda: tensor if same else tensor.copy_(flat.view(tensor.shape)))

    def _all_gather(self, group: Any, collective: Collective, tensor: Tensor, out: Tensor | None) -> Handle:
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

        return _Requests([request], finish)

    def _reduce_scatter(self, group: Any, collective: Collective, tensor: Tensor) -> Handle:
        dim, extents = collective.dim, collective.extents
        front = _summable(tensor).movedim(dim, 0).contiguous()
        piece = front.new_empty((extents[group.rank], *front.shape[1:]))
        row = front.shape[1:].numel()
        counts = [extent * row for extent in extents]
        request = group.Ireduce_scatter(front.view(-1).numpy(), piece.view(-1).numpy(), counts)

        return _Requests([request], lambda: piece.movedim(0, dim).to(tensor.dtype).contiguous())

    def _halo(self, group: Any, collective: Collective, tensor: Tensor) -> Handle:
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
        return _Requests(requests, lambda: joined(tensor, before, after, collective))

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Send a message without waiting for it."""
        peer = self._mesh.group(self._rank, send.axis)[send.to]
        if not flat.numel():
            return Finished(flat)
        request = self._world.Isend(_bytes(flat), peer, _tag(send.message, flat))
        return _Requests([request], lambda: flat)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Make room for a message."""
        peer = self._mesh.group(self._rank, recv.axis)[recv.source]
        if not flat.numel():
            return Finished(flat)
        request = self._world.Irecv(_bytes(flat), peer, _tag(recv.message, flat))
        return _Requests([request], lambda: flat)

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
