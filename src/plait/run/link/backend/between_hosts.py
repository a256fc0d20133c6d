"""What travels between the hosts of a group of `plait_shm`: by its first rank on each host, over gloo.

In: tensors of the ranks of this host. Out: those of the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.run.link.backend.local import LocalWays
from plait.run.link.shm.rows import OPERATIONS, REDUCED, reduction
from plait.run.link.shm.task import Task

GLOO_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class BetweenHosts:
    """What a rank does of a collective, and with whom."""

    def __init__(self, rank: int, hosts: Sequence[Sequence[int]], local: LocalWays, leaders: Any) -> None:
        self.size = sum(map(len, hosts))
        self.host = next(at for at, ranks in enumerate(hosts) if rank in ranks)
        self.place = hosts[self.host].index(rank)
        self.within = local.collectives
        self._hosts, self._meeting, self._leaders = hosts, local.meeting, leaders
        self._most = max(map(len, hosts))
        self._at = {other: (at, ranks.index(other)) for at, ranks in enumerate(hosts) for other in ranks}

    def at(self, rank: int) -> tuple[int, int]:
        """Host and place in it."""
        return self._at[rank]

    def finish(self, task: Task) -> None:
        """Wait for something within the host."""
        self._meeting.finish(task)

    def give_up(self, error: BaseException) -> None:
        """Let others know: those of this host at once, other hosts by a connection that ends."""
        self._meeting.give_up(error)
        self._leaders = None

    def to_leader(self, flat: Tensor, operation: str) -> None:
        """The sum over all hosts, on the first rank of each."""
        how = reduction(flat.dtype, operation)
        self.finish(self.within.reduce(flat, flat if self.place == 0 else flat[:0], 0, operation))
        if self._leaders is None:
            return
        view = flat.view(REDUCED[how.dtype])
        sent = view.int() if view.dtype is torch.int16 else view  # gloo knows no int16
        options = dist.AllreduceOptions()
        options.reduceOp = GLOO_OPERATIONS[OPERATIONS[how.operation]]  # type: ignore[assignment]
        self._leaders.allreduce([sent], options).wait()
        if sent is not view:
            view.copy_(sent)

    def from_host(self, flat: Tensor, host: int) -> None:
        """Bytes of the first rank of one host, on the first ranks of all."""
        if self._leaders is not None:
            options = dist.BroadcastOptions()
            options.rootRank = host
            self._leaders.broadcast([flat], options).wait()

    def gathered(self, flat: Tensor, wanted: Sequence[int] | None = None) -> Tensor:
        """Everybody's bytes by host and place, on all ranks of the hosts that want them; elsewhere nothing."""
        most, count = self._most, flat.numel()
        found = torch.empty(len(self._hosts), most, count, dtype=torch.uint8)
        rooms = list(found[self.host]) if self.place == 0 else []
        self.finish(self.within.all_gather(rooms[: len(self._hosts[self.host])], flat, 0))
        if self._leaders is not None:
            self._leaders.allgather(
                [list(found.view(len(self._hosts), -1))], [found[self.host].flatten()]
            ).wait()
        if wanted is None or self.host in wanted:
            self.finish(self.within.broadcast(found.view(-1), 0))
        return found

    def scattered(self, out: Tensor, pieces: Sequence[Tensor]) -> None:
        """To each rank of this host its piece of what the first one has for all."""
        own = [pieces[rank] for rank in self._hosts[self.host]] if self.place == 0 else []
        self.finish(self.within.scatter(out, own, 0))


def as_bytes(flat: Tensor) -> Tensor:
    return flat.detach().reshape(-1).view(torch.uint8)
