"""Links between processes through torch.distributed.

In: a `Collective` and a tensor, on every rank of an axis. Out: a handle on the result. NCCL knows no tags: what one
rank sends another is received in the order in which it is sent.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import torch
import torch.distributed as dist
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

_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Renamed in torch 2.13; the old names warn there."""


class _Pending:
    """Communication of torch.distributed that is under way."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._works = works
        self._finish = finish

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._finish()


class _Late:
    """A receive that is posted when its result is wanted, after those that were to come before it."""

    def __init__(self, post: Callable[[], Handle], before: deque["_Late"]) -> None:
        self._post, self._before = post, before
        self._posted: Handle | None = None

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        while self._posted is None:
            first = self._before.popleft()
            first._posted = first._post()
        return self._posted.result()


class ProcessLinks:
    """Links of one rank to the processes of its mesh; `servers` are processes beyond it, which meet nobody."""

    takes_turns = False

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        servers: int = 0,
        *,
        only: Sequence[str] | None = None,
        fresh: bool = False,
    ) -> None:
        """`only`: the axes along which these links will be used; `fresh`: by groups that nobody else uses."""
        self._mesh = mesh
        self._rank = rank
        self._buffers: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        meeting = axes_that_meet(mesh) if only is None else only
        self._groups: Mapping[str, Any] = {axes: _group(mesh, axes, rank, servers, fresh) for axes in meeting}
        self._ways: Mapping[tuple[str, bool], Any] = _ways(mesh, rank) if dist.get_backend() == "nccl" else {}
        """Along an axis, up or down: the groups in which messages travel."""
        self.loads_kernels = True
        """Whether the device may meet kernels for the first time in this step."""
        self._unposted: deque[_Late] = deque()

    def meet(self, pairs: Sequence[tuple[str, int, int]], device: torch.device) -> None:
        """Connect the pairs (axis, sender, receiver) of a program, in an order that is the same on all ranks.

        NCCL connects two ranks at their first message, and waits for the other one: ranks whose first messages are with
        different peers would wait in a circle.
        """
        token = torch.zeros(1, device=device)
        for axis, sender, receiver in pairs if self._ways else ():
            way = self._ways[axis, sender < receiver]
            if self._rank == sender:
                dist.send(token, receiver, way)
            elif self._rank == receiver:
                dist.recv(token, sender, way)

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective without waiting for it."""
        axes = meeting_axes(self._mesh, collective.axis)
        if not axes:
            return alone(collective, tensor, out)
        group, ranks = self._groups[axes], self._mesh.group(self._rank, axes)
        own = ranks.index(self._rank)
        match collective.op:
            case "all_reduce":
                return _Pending([dist.all_reduce(tensor, group=group, async_op=True)], lambda: tensor)
            case "all_gather":
                return _all_gather(tensor, collective, out, group)
            case "reduce_scatter":
                in_place = tensor.untyped_storage().data_ptr() in self._buffers
                return _reduce_scatter(tensor, collective, own, group, in_place)
        return _exchange_edges(tensor, collective, ranks, own, group)

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Send a message without waiting for it."""
        peer = self._mesh.group(self._rank, send.axis)[send.to]
        sent, way = _sendable(flat), self._ways.get((send.axis, self._rank < peer))
        work = dist.isend(sent, peer, way, tag=_tag(send.message, flat))
        return _Pending([work], lambda: sent)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Make room for a message.

        Over NCCL, in a step of a new kind, it is only asked for when it is waited for: a kernel that is used for the
        first time is loaded when the device is idle, which a receive keeps busy until the message is there.
        """
        peer = self._mesh.group(self._rank, recv.axis)[recv.source]
        room = torch.empty_like(flat, device="cpu") if _goes_by_host(flat) else flat
        way = self._ways.get((recv.axis, peer < self._rank))

        def post() -> Handle:
            work = dist.irecv(room, peer, way, tag=_tag(recv.message, flat))
            return _Pending([work], lambda: flat if room is flat else flat.copy_(room))

        if self._ways and self.loads_kernels:
            late = _Late(post, self._unposted)
            self._unposted.append(late)
            return late
        return post()

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Any memory will do."""
        buffer = torch.zeros(count, dtype=dtype, device=device)
        self._buffers[buffer.data_ptr()] = buffer
        return buffer


def _group(mesh: Mesh, axes: str, rank: int, servers: int, fresh: bool) -> Any:
    """The process group along some axes; every rank makes all groups, in the same order, as torch demands."""
    if mesh.size_of(axes) == mesh.size and not servers and not fresh:
        return dist.group.WORLD
    own = None
    for group in sorted({mesh.group(other, axes) for other in range(mesh.size)}):
        made = dist.new_group(list(group))
        if rank in group:
            own = made
    return own


def _ways(mesh: Mesh, rank: int) -> dict[tuple[str, bool], Any]:
    """Along each axis two groups of the same ranks, for messages to higher ranks and to lower ones.

    NCCL has a queue for each pair of ranks and group: with one for both ways, two ranks that each send and then receive
    wait for each other.
    """
    found: dict[tuple[str, bool], Any] = {}
    for axis, size in mesh.axes:
        for up in (False, True) if size > 1 else ():
            for group in sorted({mesh.group(other, axis) for other in range(mesh.size)}):
                made = dist.new_group(list(group))
                if rank in group:
                    found[axis, up] = made
    return found


def _all_gather(tensor: Tensor, collective: Collective, out: Tensor | None, group: Any) -> Handle:
    """Pieces of one extent land side by side; unequal ones are padded to the largest and joined without the padding."""
    dim, extents = collective.dim, collective.extents
    front = tensor.movedim(dim, 0).contiguous()
    rest = front.shape[1:]
    largest = max(extents)
    if largest * rest.numel() == 0:
        return Finished(tensor.movedim(dim, 0).new_empty((sum(extents), *rest)).movedim(0, dim).contiguous())
    if len(set(extents)) == 1:
        whole = out if out is not None else front.new_empty((sum(extents), *rest))
        work = _gather_single(whole, front, group=group, async_op=True)
        return _Pending([work], lambda: whole if dim == 0 else whole.movedim(0, dim).contiguous())
    padded = front.new_zeros((largest, *rest))
    padded[: front.shape[0]] = front
    pieces = front.new_empty((len(extents), largest, *rest))
    work = _gather_single(pieces.view(-1, *rest), padded, group=group, async_op=True)

    def finish() -> Tensor:
        joined = [piece[:extent] for piece, extent in zip(pieces, extents, strict=True)]
        if out is not None:
            return torch.cat(joined, out=out.view(sum(extents), *rest)).view(out.shape)
        return torch.cat(joined).movedim(0, dim).contiguous()

    return _Pending([work], finish)


def _reduce_scatter(tensor: Tensor, collective: Collective, own: int, group: Any, in_place: bool) -> Handle:
    """Pieces of one extent are summed as they lie; unequal ones are padded to the largest."""
    dim, extents = collective.dim, collective.extents
    front = tensor.movedim(dim, 0).contiguous()
    rest, largest = front.shape[1:], max(extents)
    if largest * rest.numel() == 0:
        return Finished(tensor.narrow(dim, 0, 0))
    if len(set(extents)) == 1:
        piece = front.narrow(0, own * largest, largest)
        piece = piece if in_place else torch.empty_like(piece)
        work = _scatter_single(piece, front, group=group, async_op=True)
        return _Pending([work], lambda: piece if dim == 0 else piece.movedim(0, dim).contiguous())
    padded = front.new_zeros((len(extents), largest, *rest))
    for place, part in zip(padded, torch.split(front, list(extents)), strict=True):
        place[: part.shape[0]] = part
    piece = torch.empty_like(padded[own])
    work = _scatter_single(piece, padded.view(-1, *rest), group=group, async_op=True)
    return _Pending([work], lambda: piece[: extents[own]].movedim(0, dim).contiguous())


def _exchange_edges(
    tensor: Tensor, collective: Collective, ranks: Sequence[int], own: int, group: Any
) -> Handle:
    """Each rank's outer rows to its neighbours, both ways at once."""
    up, down = (_sendable(edge.contiguous()) for edge in edges(tensor, collective))
    before = torch.empty_like(down) if own > 0 and down.numel() else None
    after = torch.empty_like(up) if own + 1 < len(ranks) and up.numel() else None
    wanted = []
    if own > 0:
        wanted += [(dist.isend, up, own - 1), (dist.irecv, before, own - 1)]
    if own + 1 < len(ranks):
        wanted += [(dist.irecv, after, own + 1), (dist.isend, down, own + 1)]
    moves = [
        dist.P2POp(move, edge, ranks[peer], group)
        for move, edge, peer in wanted
        if edge is not None and edge.numel()
    ]
    works = dist.batch_isend_irecv(moves) if moves else []
    joined = with_halo if collective.op == "halo" else with_halo_added

    def finish() -> Tensor:
        there = [None if edge is None else edge.to(tensor.device) for edge in (before, after)]
        return joined(tensor, there[0], there[1], collective)

    return _Pending(works, finish)


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy in host memory: only NCCL sends from a device."""
    return tensor.cpu() if _goes_by_host(tensor) else tensor


def _goes_by_host(tensor: Tensor) -> bool:
    return tensor.is_cuda and dist.get_backend() != "nccl"


def _tag(message: str, flat: Tensor) -> int:
    """Messages arrive in the order in which they were sent, as the checker has proven: no link needs it, NCCL has none.

    Where there are tags, one that is not expected, or of another size, never comes, which is told.
    """
    return crc32(f"{message}, {flat.numel()} bytes".encode()) & 0x3FFFFFFF
