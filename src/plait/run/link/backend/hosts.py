"""How the ranks of a group of `plait_shm` on several hosts do what torch asks of them.

In: the ways of the ranks of this host, gloo between the first ranks of hosts and between all. Out: collectives in the
order in which they were asked for, on a thread: within each host through memory, between the hosts' first ranks over
gloo, and back. Messages and all-to-all, where every byte has one receiver, go over gloo alone. All ranks compare what
they are about to do first: nothing is summed that differs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import RunError
from plait.run.link.backend.between_hosts import BetweenHosts, as_bytes
from plait.run.link.backend.local import LocalWays
from plait.run.link.backend.work import Copied, HostWork
from plait.run.link.background import Background, UnderWay
from plait.run.link.shm.collectives import Then
from plait.run.link.shm.memory import flat_of
from plait.run.link.shm.rows import OPERATIONS, reduction
from plait.run.link.shm.task import DTYPES, KINDS, SAME_FIX, told


class HostWays:
    """Through memory within hosts, over gloo between them."""

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], local: LocalWays, leaders: Any, everyone: Any
    ) -> None:
        """`hosts`: the ranks of each, in one order on all; `leaders`: gloo between the first ones, None on others."""
        self._local, self._everyone = local, everyone
        self._between = BetweenHosts(rank, hosts, local, leaders)
        self.collectives = HostCollectives(rank, self._between, everyone)
        self._sending = Background("plait_shm messages")

    def work(self, started: UnderWay, outcome: Any, *, waits: bool, num_bytes: int) -> dist.Work:
        """See `Ways`."""
        work = HostWork(started, outcome)
        if waits:
            work.wait()
        return work

    def send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        """See `Ways`."""
        flat = flat_of(tensor)
        work = self._everyone.send([flat], to, tag)

        def wait() -> Tensor:  # gloo forgets a message that nobody waits for
            work.wait()
            return flat

        return HostWork(self._sending.start(wait), [])

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        """See `Ways`."""
        room = flat_of(tensor, read=False)
        came = self._everyone.recv if source is not None else self._everyone.recv_anysource
        work: dist.Work = came([room], source, tag) if source is not None else came([room], tag)
        return work if room.data_ptr() == tensor.data_ptr() else Copied(work, tensor, room)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """See `Ways`."""
        return self._local.empty(count, dtype)

    def close(self) -> None:
        """See `Ways`."""
        self._local.close()


class HostCollectives:
    """What one rank may ask of its group; see `GroupCollectives`."""

    def __init__(self, rank: int, between: BetweenHosts, everyone: Any) -> None:
        self._rank, self._size, self._between, self._everyone = rank, between.size, between, everyone
        self._background = Background("plait_shm between hosts")
        self._count = 0
        self._error: BaseException | None = None

    def barrier(self) -> UnderWay:
        """Everybody waits for everybody."""
        return self._start("barrier", torch.empty(0), lambda: None)

    def all_reduce(self, flat: Tensor, operation: str = "sum", then: Then | None = None) -> UnderWay:
        """The sum of all tensors, in `flat`."""

        def run() -> None:
            self._summed(flat, operation)
            self._between.finish(self._between.within.broadcast(flat, 0))

        return self._start("all_reduce", flat, run, then, operation=operation)

    def reduce(
        self, flat: Tensor, out: Tensor, root: int, operation: str = "sum", then: Then | None = None
    ) -> UnderWay:
        """The sum of all tensors, in the root's `out`."""
        host, _ = self._between.at(root)

        def run() -> None:
            total = flat.clone()
            self._summed(total, operation)
            if self._between.host == host:
                self._between.finish(self._between.within.broadcast(total, 0))
            if self._rank == root:
                out.copy_(total)

        return self._start("reduce", flat, run, then, operation=operation, root=root)

    def broadcast(self, flat: Tensor, root: int, then: Then | None = None) -> UnderWay:
        """The root's tensor, on all."""
        host, place = self._between.at(root)

        def run() -> None:
            if self._between.host == host:
                self._between.finish(self._between.within.broadcast(flat, place))
            self._between.from_host(flat, host)
            if self._between.host != host:
                self._between.finish(self._between.within.broadcast(flat, 0))

        return self._start("broadcast", flat, run, then, root=root)

    def all_gather(
        self, outs: Sequence[Tensor], flat: Tensor, root: int = -1, then: Then | None = None
    ) -> UnderWay:
        """Everybody's tensor, on all; with a root, on that rank alone."""
        wanted = None if root < 0 else (self._between.at(root)[0],)

        def run() -> None:
            found = self._between.gathered(as_bytes(flat), wanted)
            for rank, out in enumerate(outs if root in (-1, self._rank) else ()):
                host, place = self._between.at(rank)
                as_bytes(out).copy_(found[host, place])

        return self._start("all_gather" if root < 0 else "gather", flat, run, then, root=root)

    def reduce_scatter(
        self, out: Tensor, pieces: Sequence[Tensor], operation: str = "sum", then: Then | None = None
    ) -> UnderWay:
        """Of as many pieces as there are ranks, the sum of one's own."""

        def run() -> None:
            whole = torch.cat([piece.reshape(-1) for piece in pieces])
            self._summed(whole, operation)
            self._between.scattered(out, torch.split(whole, out.numel()) if out.numel() else pieces)

        return self._start("reduce_scatter", out, run, then, operation=operation)

    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int, then: Then | None = None) -> UnderWay:
        """To each rank its piece of what the root has."""
        host, place = self._between.at(root)

        def run() -> None:
            whole = torch.cat(list(pieces)) if pieces else out.new_empty(self._size * out.numel())
            if self._between.host == host:
                self._between.finish(self._between.within.broadcast(whole, place))
            self._between.from_host(whole, host)
            self._between.scattered(out, list(whole.reshape(self._size, out.numel())))

        return self._start("scatter", out, run, then, root=root)

    def all_to_all(
        self, outs: Sequence[Tensor], pieces: Sequence[Tensor], then: Then | None = None
    ) -> UnderWay:
        """A tensor from every rank to every other, of any sizes: they tell each other the sizes first."""

        def run() -> None:
            sizes = torch.tensor([piece.nbytes for piece in pieces])
            found = self._between.gathered(as_bytes(sizes)).view(torch.int64)
            for rank, out in enumerate(outs):
                sent = int(found[(*self._between.at(rank), self._rank)])
                if sent != out.nbytes:
                    raise RunError(
                        f"all_to_all: rank {rank} of the group sends {sent:,} bytes to rank {self._rank}, which "
                        f"expects {out.nbytes:,}.",
                        fix="give both ranks the same split sizes.",
                    )
            room = torch.empty(sum(out.nbytes for out in outs), dtype=torch.uint8)
            given = torch.cat([as_bytes(piece) for piece in pieces])
            counts = [[tensor.nbytes for tensor in found] for found in (outs, pieces)]
            self._everyone.alltoall_base(room, given, *counts, dist.AllToAllOptions()).wait()
            for out, came in zip(outs, torch.split(room, counts[0]), strict=True):
                as_bytes(out).copy_(came)

        return self._start("all_to_all", outs[0][:0], run, then)

    def _summed(self, flat: Tensor, operation: str) -> None:
        self._between.to_leader(flat, "sum" if operation == "mean" else operation)
        if operation == "mean":
            flat.div_(self._size)

    def _start(
        self,
        kind: str,
        flat: Tensor,
        run: Callable[[], None],
        then: Then | None = None,
        *,
        operation: str | None = None,
        root: int = -1,
    ) -> UnderWay:
        """Do it after all that was asked for before, once all ranks are known to do the same."""
        if operation is not None:
            reduction(flat.dtype, operation)  # an error here, where the caller is
        code = OPERATIONS.index(operation) if operation is not None else -1
        dtype = DTYPES.index(flat.dtype) if flat.dtype in DTYPES else len(DTYPES)
        words = (self._count, KINDS.index(kind), dtype if kind != "barrier" else 0, code, root, flat.nbytes)
        self._count += 1

        def work() -> Tensor:
            if self._error is not None:
                raise self._error
            try:
                with torch.no_grad():
                    self._agree(words)
                    run()
                    if then is not None:
                        then(None)  # type: ignore[arg-type]
            except BaseException as error:
                self._error = error
                self._between.give_up(error)
                raise
            return flat

        return self._background.start(work)

    def _agree(self, words: Sequence[int]) -> None:
        found = self._between.gathered(as_bytes(torch.tensor(words))).view(torch.int64)
        for rank in range(self._size):
            theirs = found[self._between.at(rank)].tolist()
            if theirs != list(words):
                raise RunError(
                    f"the ranks do not do the same: rank {self._rank} of the group has {_described(words)}, "
                    f"rank {rank} has {_described(theirs)} (their collective number {words[0]}).",
                    fix=SAME_FIX,
                )


def _described(words: Sequence[int]) -> str:
    _, kind, dtype, operation, root, num_bytes = words
    known = DTYPES[dtype] if dtype < len(DTYPES) else None
    return told(KINDS[kind], known, operation, root, num_bytes)
