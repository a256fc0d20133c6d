"""Links between threads of one process.

In: collectives of ranks that are threads. Out: their results. The n-th collective of a rank meets the n-th of every
other; whoever comes last does the work for all, as one device does it in torch.nn.DataParallel, while the others rest
without the interpreter's lock. Where one of them fails, nobody is left waiting for it.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective, Recv, Send
from plait.run.link.links import Handle, edges, with_halo, with_halo_added


class AbandonedMeetingError(ConnectionError):
    """Another thread has failed, and has said why."""


class Meetings:
    """Where threads of one process meet."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._changed = threading.Condition()
        self._brought: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = {}
        self._results: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = {}
        self._is_abandoned = False

    def abandon(self) -> None:
        """Somebody will not come: nobody waits any more."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def arrive(
        self, meeting: tuple[tuple[int, ...], int], rank: int, tensor: Tensor, collective: Collective
    ) -> None:
        """Bring a tensor, which nobody writes to before the result is there."""
        with self._changed:
            brought = self._brought.setdefault(meeting, {})
            brought[rank] = tensor
            if len(brought) < len(meeting[0]):
                return
            del self._brought[meeting]
        tensors = [brought[member] for member in meeting[0]]
        made = dict(zip(meeting[0], results_of(collective, tensors), strict=True))
        with self._changed:
            self._results[meeting] = made
            self._changed.notify_all()

    def take(self, meeting: tuple[tuple[int, ...], int], rank: int) -> Tensor:
        """What came of it for one rank, once all have come."""
        with self._changed:
            while meeting not in self._results:
                if self._is_abandoned:
                    raise AbandonedMeetingError("another thread of this process has failed.")
                self._changed.wait()
            found = self._results[meeting].pop(rank)
            if not self._results[meeting]:
                del self._results[meeting]
        return found


def results_of(collective: Collective, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What each rank has after a collective; sums are in the order of ranks, on the device of the first."""
    first = tensors[0]
    match collective.op:
        case "broadcast":
            return [first.to(tensor.device) for tensor in tensors]
        case "reduce":
            for tensor in tensors[1:]:
                first.add_(tensor.to(first.device))
            return list(tensors)
        case "all_reduce":
            for tensor in tensors[1:]:
                first.add_(tensor.to(first.device))
            return [first, *(tensor.copy_(first) for tensor in tensors[1:])]
        case "all_gather":
            whole = torch.cat([tensor.to(first.device) for tensor in tensors], collective.dim)
            return [whole.to(tensor.device, copy=True) for tensor in tensors]
        case "reduce_scatter":
            total = sum((tensor.to(first.device) for tensor in tensors[1:]), start=first)
            pieces: Sequence[Tensor] = torch.split(total, list(collective.extents), collective.dim)
            return [
                piece.to(tensor.device, copy=True, memory_format=torch.contiguous_format)
                for piece, tensor in zip(pieces, tensors, strict=True)
            ]
    add = with_halo if collective.op == "halo" else with_halo_added
    found = []
    for own, tensor in enumerate(tensors):
        before = edges(tensors[own - 1], collective)[1].to(tensor.device) if own > 0 else None
        after = edges(tensors[own + 1], collective)[0].to(tensor.device) if own + 1 < len(tensors) else None
        found.append(add(tensor, before, after, collective))
    return found


class _Meeting:
    def __init__(
        self, meetings: Meetings, meeting: tuple[tuple[int, ...], int], rank: int, out: Tensor | None
    ) -> None:
        self._meetings, self._meeting, self._rank, self._out = meetings, meeting, rank, out

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        found = self._meetings.take(self._meeting, self._rank)
        return found if self._out is None else self._out.copy_(found.view(self._out.shape))


class ThreadLinks:
    """One thread's links to the others."""

    takes_turns = False

    def __init__(self, meetings: Meetings, rank: int) -> None:
        self.meetings, self._rank = meetings, rank
        self._counts: dict[tuple[int, ...], int] = {}

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Bring a tensor to the meeting."""
        group = self.meetings.mesh.group(self._rank, collective.axis)
        number = self._counts[group] = self._counts.get(group, -1) + 1
        self.meetings.arrive((group, number), self._rank, tensor, collective)
        return _Meeting(self.meetings, (group, number), self._rank, out)

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Never called."""
        raise AssertionError("threads meet; they send no messages")

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Never called."""
        raise AssertionError("threads meet; they send no messages")

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Any memory will do."""
        return torch.zeros(count, dtype=dtype, device=device)
