"""Links between ranks of several hosts: shared memory within a host, sockets between hosts, both in one collective.

In: a mesh whose ranks fill equal hosts one after the other. Out: `Links`. Along axes within a host nothing leaves its
memory; along axes between hosts all goes by sockets; along axes that do both, a sum is first made within each host,
then between hosts by ranks at the same place in them, each with its part, and then gathered within (`TwoLevel`), where
the cost model says that this is cheaper than everybody with everybody. Those run on threads, beside the computation,
sums in pieces: while some are between hosts, others are in the memory of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.cost.collective_time import is_two_level_cheaper, num_pieces
from plait.program.hops.price import Network
from plait.program.instructions import Collective, Recv, Send
from plait.program.value import Value
from plait.run.link.background import Background
from plait.run.link.links import Handle, Links, axes_that_meet, meeting_axes
from plait.run.link.process_links import ProcessLinks

Op = Literal["all_reduce", "all_gather", "reduce_scatter"]
Between = tuple[Tensor, list[int], Handle]
"""A tensor or a piece of a sum, how it is shared, and this rank's part of it on its way."""
_WITHIN = "@host"
"""Added to the name of an axis that is partly within hosts: its inner part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMesh:
    """A mesh cut at the boundary of hosts: each axis is between hosts or within one."""

    mesh: Mesh
    """As the plan has it."""
    refined: Mesh
    """The same ranks in the same order; the axis at the boundary became two."""
    within: Mesh
    """The ranks of one host."""

    @classmethod
    def of(cls, mesh: Mesh, per_host: int) -> "HostMesh | None":
        """None where hosts are no boxes of the mesh."""
        refined: list[tuple[str, int]] = []
        within: list[tuple[str, int]] = []
        left = per_host
        for name, size in reversed(mesh.axes):
            inner = min(left, size)
            if size % inner or left % inner:
                return None
            left //= inner
            if 1 < inner < size:
                refined[:0] = [(name, size // inner), (name + _WITHIN, inner)]
                within.insert(0, (name + _WITHIN, inner))
            else:
                refined.insert(0, (name, size))
                within[:0] = [(name, size)] if inner == size else []
        if left > 1:
            return None
        return cls(mesh=mesh, refined=Mesh(axes=tuple(refined)), within=Mesh(axes=tuple(within)))

    def describe(self) -> str:
        """Which axes are where, for people."""
        inner = dict(self.within.axes)
        within = [f"{name.removesuffix(_WITHIN)}={size}" for name, size in self.within.axes if size > 1]
        between = [f"{name}={size}" for name, size in self.refined.axes if name not in inner and size > 1]
        return f"{' x '.join(within)} within each host, {' x '.join(between)} between hosts"

    def parts(self, axis: str) -> tuple[str, str]:
        """The names of an axis (or of several) between hosts and within one; "" where it has no such part."""
        inner = dict(self.within.axes)
        between, within = [], []
        for name in axis.split("+"):
            if name + _WITHIN in inner:
                between.append(name)
                within.append(name + _WITHIN)
            else:
                (within if name in inner else between).append(name)
        return meeting_axes(self.refined, "+".join(between)), meeting_axes(self.refined, "+".join(within))

    def whole(self, axis: str) -> str:
        """An axis in the names of `refined`."""
        return meeting_axes(self.refined, "+".join(self.parts(axis)))


class TwoLevel:
    """Collectives of ranks on several hosts, several on each; ranks of a group are in the order of hosts."""

    def __init__(
        self, shared: Links, sockets: Links, between: str, within: str, place: int, each: int
    ) -> None:
        """`place`: this rank's among the `each` ranks of the group on its host."""
        self._shared, self._sockets = shared, sockets
        self._between, self._within = between, within
        self._place, self._each = place, each

    def _start(
        self, op: Op, inside: bool, tensor: Tensor, extents: Sequence[int] = (), out: Tensor | None = None
    ) -> Handle:
        links, axis = (self._shared, self._within) if inside else (self._sockets, self._between)
        here = (Value.bucket(0),)
        collective = Collective(
            name=op,
            op=op,
            axis=axis,
            extents=tuple(extents),
            reads=here,
            writes=here,
            num_bytes=tensor.nbytes,
        )
        return links.start(collective, tensor, out)

    def _do(
        self, op: Op, inside: bool, tensor: Tensor, extents: Sequence[int] = (), out: Tensor | None = None
    ) -> Tensor:
        return self._start(op, inside, tensor, extents, out).result()

    def begin(self, collective: Collective, tensor: Tensor, between: "list[Between]") -> Tensor:
        """What is before the network; then it is `between` hosts. Returns what a sum of pieces is made in."""
        if collective.op == "all_reduce":
            return self._begin_sum(tensor, between)
        front, by_place = tensor.movedim(collective.dim, 0), self._by_place(collective)
        if collective.op == "reduce_scatter":
            pieces, each = torch.split(front, list(collective.extents)), self._each
            ordered = torch.cat([piece for place in range(each) for piece in pieces[place::each]])
            front = self._do("reduce_scatter", True, ordered, [sum(found) for found in by_place])
        op: Op = "reduce_scatter" if collective.op == "reduce_scatter" else "all_gather"
        own = by_place[self._place]
        between.append((tensor, own, self._start(op, False, front.contiguous(), own)))
        return tensor

    def _begin_sum(self, tensor: Tensor, between: "list[Between]") -> Tensor:
        """Sums of pieces within the host."""
        flat = tensor.reshape(-1)
        for piece in torch.tensor_split(flat, num_pieces(flat.nbytes)):
            whole, rest = divmod(piece.numel(), self._each)
            extents = [whole + (place < rest) for place in range(self._each)]
            part = self._do("reduce_scatter", True, piece, extents)
            between.append((piece, extents, self._start("all_reduce", False, part)))
        return flat

    def end(
        self,
        collective: Collective,
        tensor: Tensor,
        begun: Tensor,
        between: "Sequence[Between]",
        out: Tensor | None,
    ) -> Tensor:
        """What is after the network, by links of its own: what has come back, to all ranks of the host."""
        if collective.op == "all_reduce":
            gathers = [
                self._start("all_gather", True, handle.result(), extents, piece)
                for piece, extents, handle in between
            ]
            for gather in gathers:
                gather.result()
            is_there = begun.data_ptr() == tensor.data_ptr()
            return tensor if is_there else tensor.copy_(begun.view(tensor.shape))
        ((_, _, handle),) = between
        if collective.op == "reduce_scatter":
            return handle.result().movedim(0, collective.dim).contiguous()
        by_place, count = self._by_place(collective), len(collective.extents)
        gathered = self._do("all_gather", True, handle.result(), [sum(found) for found in by_place])
        pieces = torch.split(gathered, [extent for found in by_place for extent in found])
        hosts = count // self._each
        by_rank = [pieces[place * hosts + host] for host in range(hosts) for place in range(self._each)]
        if out is not None:
            torch.cat(by_rank, out=out.view(sum(collective.extents), *gathered.shape[1:]))
            return out
        return torch.cat(by_rank).movedim(0, collective.dim).contiguous()

    def _by_place(self, collective: Collective) -> list[list[int]]:
        """Extents of those at the same place in their hosts."""
        return [list(collective.extents[place :: self._each]) for place in range(self._each)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """Collectives along one axis that is within hosts and between them."""

    shared: Links
    """Within the host, for what is before the network."""
    two: TwoLevel
    back: TwoLevel
    """The same with other links within the host, for what is after it: a thread of its own does it, while the first
    thread has the next collective on its way."""
    thread: Background
    second: Background

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None) -> Handle:
        between: list[Between] = []
        first = self.thread.start(lambda: self.two.begin(collective, tensor, between))
        return self.second.start(lambda: self.back.end(collective, tensor, first.result(), between, out))


class HostLinks:
    """Links of one rank to the processes of its mesh, on this host and on others."""

    takes_turns = False

    def __init__(
        self,
        hosts: HostMesh,
        rank: int,
        shared: Links,
        share: Callable[[], tuple[Links, Links] | None],
        network: Network,
        *,
        fresh: bool = False,
    ) -> None:
        """`shared`: links through the memory of this host, of which `share` makes more, for two threads."""
        self._hosts, self._rank, self._network = hosts, rank, network
        self._place = rank % hosts.within.size
        self._first = rank - self._place
        self._shared, self._sockets = shared, ProcessLinks(hosts.refined, rank, fresh=fresh)
        self._levels: dict[str, _Level] = {}
        for axis in axes_that_meet(hosts.mesh):
            between, within = hosts.parts(axis)
            if not between or not within:
                continue
            shared_by_threads = share()
            assert shared_by_threads is not None, "memory that could be shared cannot any more"
            sockets = ProcessLinks(hosts.refined, rank, only=[between])
            group = hosts.within.group(self._place, within)
            two, back = (
                TwoLevel(links, sockets, between, within, group.index(self._place), len(group))
                for links in shared_by_threads
            )
            names = f"links along {axis}", f"links along {axis}, back"
            self._levels[axis] = _Level(
                shared=shared_by_threads[0],
                two=two,
                back=back,
                thread=Background(names[0]),
                second=Background(names[1]),
            )

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective without waiting for it."""
        between, within = self._hosts.parts(collective.axis)
        if not between:
            return self._shared.start(replace(collective, axis=within), tensor, out)
        flat = replace(collective, axis=self._hosts.whole(collective.axis))
        axis = meeting_axes(self._hosts.mesh, collective.axis)
        if axis in self._levels and self.is_two_level(collective):
            return self._levels[axis].start(collective, tensor, out)
        return self._sockets.start(flat, tensor, out)

    def is_two_level(self, collective: Collective) -> bool:
        """Whether a collective is made within hosts first: by the cost model, the same on all ranks."""
        reach = self._network.reach(self._hosts.mesh.group(self._rank, collective.axis))
        return is_two_level_cheaper(collective.op, collective.num_bytes, reach)

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Send through memory to a rank of this host, else by socket."""
        local = self._local(send.axis, send.to)
        if local is not None:
            return self._shared.send(replace(send, axis=local[0], to=local[1]), flat)
        return self._sockets.send(replace(send, axis=self._hosts.whole(send.axis)), flat)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Make room for a message, wherever it comes from."""
        local = self._local(recv.axis, recv.source)
        if local is not None:
            return self._shared.receive(replace(recv, axis=local[0], source=local[1]), flat)
        return self._sockets.receive(replace(recv, axis=self._hosts.whole(recv.axis)), flat)

    def _local(self, axis: str, peer: int) -> tuple[str, int] | None:
        """The axis within this host and the coordinate on it of a rank that is here, too."""
        other = self._hosts.mesh.group(self._rank, axis)[peer]
        if not self._first <= other < self._first + self._hosts.within.size:
            return None
        within = self._hosts.parts(axis)[1]
        return within, self._hosts.within.group(self._place, within).index(other - self._first)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Memory of this host where its ranks have a part in what travels along the axis."""
        meeting = meeting_axes(self._hosts.mesh, axis)
        if meeting in self._levels:
            return self._levels[meeting].shared.buffer(count, dtype, device, self._hosts.parts(axis)[1])
        links: Links = self._sockets if self._hosts.parts(axis)[0] else self._shared
        return links.buffer(count, dtype, device, axis)
