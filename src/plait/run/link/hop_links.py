"""Collectives by an algorithm that a plan chose, hop by hop, over links that carry messages.

In: links of one rank, the name of an algorithm. Out: links whose sums and gathers are made by it; everything else goes
on as before. The hops of a collective run where its result is waited for, so a `Plan` refuses it where ranks wait for
different things: under pipelines and servers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.hops.algorithms import rounds_of
from plait.program.hops.program import block_sizes
from plait.program.hops.rounds import instructions
from plait.program.instructions import Collective, Instruction, Recv, Send
from plait.run.link.hops import run_hops
from plait.run.link.links import Handle, Links

_KEPT = 256
"""Collectives whose hops are remembered: those of a step come again in the next."""


@lru_cache(_KEPT)
def _hops(op: str, algorithm: str, sizes: tuple[int, ...], axis: str) -> list[tuple[Instruction, ...]]:
    return instructions(rounds_of(op, algorithm, len(sizes)), len(sizes), sizes, axis)


class HopLinks:
    """Links of one rank, with sums and gathers by one algorithm."""

    def __init__(self, links: Links, mesh: Mesh, rank: int, algorithm: str) -> None:
        self._links, self._mesh, self._rank, self._algorithm = links, mesh, rank, algorithm
        self._counts: dict[tuple[int, ...], int] = {}
        self.takes_turns = links.takes_turns
        """As the links below have it."""

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective; its hops are made when its result is wanted."""
        group = self._mesh.group(self._rank, collective.axis)
        if len(group) == 1 or collective.op in ("halo", "halo_add"):
            return self._links.start(collective, tensor, out)
        own, ranks = group.index(self._rank), len(group)
        dim, extents = collective.dim, collective.extents
        if collective.op == "all_reduce":
            flat = tensor.reshape(-1)
            blocks = list(torch.split(flat, list(block_sizes(flat.numel(), ranks))))

            def finish() -> Tensor:
                return (
                    tensor if flat.data_ptr() == tensor.data_ptr() else tensor.copy_(flat.view(tensor.shape))
                )
        else:
            front = tensor.movedim(dim, 0)
            rest = front.shape[1:]
            whole = front.new_empty((sum(extents), *rest))
            pieces = list(torch.split(whole, list(extents)))
            if collective.op == "all_gather":
                pieces[own].copy_(front)
            else:
                whole.copy_(front)
            blocks = [piece.view(-1) for piece in pieces]

            def finish() -> Tensor:
                if collective.op == "reduce_scatter":
                    return pieces[own].movedim(0, dim).contiguous()
                return whole.movedim(0, dim).contiguous() if out is None else out.copy_(whole.view(out.shape))

        return _Hopping(self._run(collective, group, own, blocks), finish)

    def _run(
        self, collective: Collective, group: tuple[int, ...], own: int, blocks: Sequence[Tensor]
    ) -> Iterator[None]:
        number = self._counts[group] = self._counts.get(group, -1) + 1
        sizes = tuple(block.nbytes for block in blocks)
        found = _hops(collective.op, self._algorithm, sizes, collective.axis)[own]
        named = [
            replace(i, message=f"{number}: {i.message}") if isinstance(i, Send | Recv) else i for i in found
        ]
        return run_hops(named, self._links, blocks)

    def send(self, send: Send, flat: Tensor) -> Handle:
        """As the links below have it."""
        return self._links.send(send, flat)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """As the links below have it."""
        return self._links.receive(recv, flat)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """As the links below have it."""
        return self._links.buffer(count, dtype, device, axis)


class _Hopping:
    """A collective of which hops may still be to be made."""

    def __init__(self, turns: Iterator[None], finish: Callable[[], Tensor]) -> None:
        self._turns, self._finish = turns, finish
        self._is_over = False

    def ready(self) -> bool:
        if not self._is_over:
            self._is_over = next(self._turns, self) is self
        return self._is_over

    def result(self) -> Tensor:
        while not self.ready():
            pass
        return self._finish()


def by_algorithm(links: Links, mesh: Mesh, rank: int, algorithm: str) -> Links:
    """The links as they are, or with the algorithm of a plan."""
    return links if algorithm in ("backend", "shared") else HopLinks(links, mesh, rank, algorithm)
