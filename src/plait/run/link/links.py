"""Communication between ranks, behind one small interface.

In: a `Collective` and a tensor. Out: a handle on the result. `ProcessLinks` (in `process_links.py`) talks to other
processes through torch.distributed, `SharedLinks` (in `shared_links.py`) through memory; the serial interpreter has
mailboxes of its own. Everything else of a rank is the same in all of them.
"""

from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective, Recv, Send


class Handle(Protocol):
    """A collective under way."""

    def ready(self) -> bool:
        """Whether `result` would not have to wait for another rank; processes wait in `result` and always say yes."""

    def result(self) -> Tensor:
        """The outcome."""


class Links(Protocol):
    """Starts collectives for one rank."""

    takes_turns: bool
    """Whether the other ranks are in this process, and must move before a result is there."""

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin; nobody writes to `tensor` before the result is there.

        An all_reduce may work in `tensor`, and a reduce_scatter in one of `buffer`, whose piece is then the result.
        `out`: where an all_gather on dim 0 leaves its result, contiguous; `tensor` may be its own piece of it.
        """

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Send bytes to another rank; `flat` is not written before the handle's result."""

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Receive bytes from another rank into `flat`."""

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """A flat tensor of zeros, in memory from which these links send fastest along `axis`.

        An all_gather may read pieces of it on other ranks in place: it is not written before all have their result.
        """


def axes_that_meet(mesh: Mesh) -> list[str]:
    """Every choice of axes along which ranks can meet, joined by `+`, in an order that all ranks share."""
    names = [name for name, size in mesh.axes if size > 1]
    return ["+".join(chosen) for count in range(1, len(names) + 1) for chosen in combinations(names, count)]


def meeting_axes(mesh: Mesh, axis: str) -> str:
    """The name in `axes_that_meet` of an axis, or of several joined by `+` in any order; "" where one rank is alone."""
    names = axis.split("+")
    return "+".join(name for name, size in mesh.axes if size > 1 and name in names)


class Finished:
    """A collective that had nobody to wait for."""

    def __init__(self, outcome: Tensor) -> None:
        self._outcome = outcome

    def ready(self) -> bool:
        """Always."""
        return True

    def result(self) -> Tensor:
        """What it was made with."""
        return self._outcome


def alone(collective: Collective, tensor: Tensor, out: Tensor | None) -> Handle:
    """A collective of one rank."""
    if collective.op == "halo":
        return Finished(with_halo(tensor, None, None, collective))
    if collective.op == "halo_add":
        return Finished(with_halo_added(tensor, None, None, collective))
    if out is None:
        return Finished(tensor)
    return Finished(out if out.data_ptr() == tensor.data_ptr() else out.copy_(tensor.view(out.shape)))


def with_halo(own: Tensor, before: Tensor | None, after: Tensor | None, collective: Collective) -> Tensor:
    """A piece between the rows of its neighbours; the fill where there is none."""

    def filled(count: int) -> Tensor:
        shape = list(own.shape)
        shape[collective.dim] = count
        return own.new_full(shape, collective.fill)

    first = filled(collective.before) if before is None else before
    last = filled(collective.after) if after is None else after
    return torch.cat([first, own, last], collective.dim)


def with_halo_added(
    own: Tensor, before: Tensor | None, after: Tensor | None, collective: Collective
) -> Tensor:
    """A piece without its outer rows, plus those of its neighbours that lie on it (`before`: of the rank before)."""
    dim = collective.dim
    extent = own.shape[dim] - collective.before - collective.after
    inner = own.narrow(dim, collective.before, extent).clone(memory_format=torch.contiguous_format)
    if before is not None:
        inner.narrow(dim, 0, collective.after).add_(before)
    if after is not None:
        inner.narrow(dim, extent - collective.before, collective.before).add_(after)
    return inner


def edges(tensor: Tensor, collective: Collective) -> tuple[Tensor, Tensor]:
    """The rows that go to the rank before and to the next one."""
    extent, dim = tensor.shape[collective.dim], collective.dim
    up, down = collective.after, collective.before
    if collective.op == "halo_add":  # its own outer rows, which lie on the neighbours
        up, down = down, up
    return tensor.narrow(dim, 0, up), tensor.narrow(dim, extent - down, down)


class NoLinks:
    """The links of a rank that is alone."""

    takes_turns = False

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Never called."""
        raise AssertionError("a rank that is alone has nobody to send to")

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Never called."""
        raise AssertionError("a rank that is alone has nobody to receive from")

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Done at once."""
        return alone(collective, tensor, out)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Any memory will do."""
        return torch.zeros(count, dtype=dtype, device=device)
