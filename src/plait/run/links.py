"""Communication between ranks, behind one small interface.

In: a `Collective` and a tensor. Out: a handle on the result. `ProcessLinks` talks to other processes through
torch.distributed, `SharedLinks` (in `shared_links.py`) through memory; the serial interpreter has mailboxes of its
own. Everything else of a rank is the same in all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective


class Handle(Protocol):
    """A collective under way."""

    def ready(self) -> bool:
        """Whether `result` would not have to wait for another rank; processes wait in `result` and always say yes."""

    def result(self) -> Tensor:
        """The outcome."""


class Links(Protocol):
    """Starts collectives for one rank."""

    def start(self, collective: Collective, tensor: Tensor) -> Handle:
        """Begin; an all-reduce may work in place on `tensor`."""

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """A flat tensor of zeros, in memory from which these links send fastest along `axis`."""


class _Pending:
    """A collective of torch.distributed that is under way."""

    def __init__(self, work: Any, finish: Any) -> None:
        self._work = work
        self._finish = finish

    def ready(self) -> bool:
        return True

    def result(self) -> Tensor:
        self._work.wait()
        result: Tensor = self._finish()
        return result


class ProcessLinks:
    """Links of one rank to the processes of its mesh."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._groups: Mapping[str, Any] = {axis: _group(mesh, axis, rank) for axis, _ in mesh.axes}

    def start(self, collective: Collective, tensor: Tensor) -> Handle:
        """Begin a collective without waiting for it."""
        group = self._groups[collective.axis]
        if collective.op == "all_reduce":
            return _Pending(dist.all_reduce(tensor, group=group, async_op=True), lambda: tensor)
        return _all_gather(tensor, collective.dim, collective.extents, group)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Any memory will do."""
        return torch.zeros(count, dtype=dtype, device=device)


def _group(mesh: Mesh, axis: str, rank: int) -> Any:
    """The process group along an axis; every rank makes all groups, in the same order, as torch demands."""
    if len(mesh.axes) == 1:
        return dist.group.WORLD
    own = None
    for group in sorted({mesh.group(other, axis) for other in range(mesh.size)}):
        made = dist.new_group(list(group))
        if rank in group:
            own = made
    return own


def _all_gather(tensor: Tensor, dim: int, extents: Sequence[int], group: Any) -> Handle:
    """Gather pieces of unequal extent: padded to the largest, joined without the padding."""
    front = tensor.movedim(dim, 0)
    largest = max(extents)
    padded = front.new_zeros((largest, *front.shape[1:]))
    padded[: front.shape[0]] = front
    pieces = [torch.empty_like(padded) for _ in extents]
    work = dist.all_gather(pieces, padded, group=group, async_op=True)

    def finish() -> Tensor:
        joined = torch.cat([piece[:extent] for piece, extent in zip(pieces, extents, strict=True)])
        return joined.movedim(0, dim).contiguous()

    return _Pending(work, finish)


class NoLinks:
    """The links of a rank that is alone: its programs have no collective."""

    def start(self, collective: Collective, tensor: Tensor) -> Handle:
        """Never called."""
        raise AssertionError("a program of one rank has no collective")

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Never called."""
        raise AssertionError("a program of one rank has no bucket to send")
