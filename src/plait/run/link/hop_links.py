"""Collectives by an algorithm that a plan chose, hop by hop, over links that carry messages.

In: links of one rank, the name of an algorithm. Out: links whose sums and gathers are made by it; everything else goes
on as before. Between processes the hops of a collective are made on a thread (`lanes.py`); among the ranks of one
process whenever somebody waits (`advance`), whatever for: ranks of a pipeline wait for different things.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from plait.cluster.devices import DEVICES
from plait.plan.mesh import Mesh
from plait.plan.plan import Plan
from plait.program.hops.algorithms import rounds_of
from plait.program.hops.price import BACKEND, Network, algorithm_of
from plait.program.hops.program import collective_program
from plait.program.hops.rounds import block_sizes, instructions
from plait.program.instructions import Collective, Combine, Instruction, Recv, Send, Wait
from plait.run.link.background import HopSpan
from plait.run.link.hops import run_hops
from plait.run.link.links import Handle, Links

_KEPT = 256
"""Collectives whose hops are remembered: those of a step come again in the next."""


@lru_cache(_KEPT)
def _hops(
    op: str, algorithm: str, sizes: tuple[int, ...], axis: str, hosts: int
) -> list[tuple[Instruction, ...]]:
    _prove(op, algorithm, len(sizes), hosts)
    return instructions(rounds_of(op, algorithm, len(sizes), hosts=hosts), len(sizes), sizes, axis)


@lru_cache(_KEPT)
def _prove(op: str, algorithm: str, ranks: int, hosts: int) -> None:
    """The checker's word that every message is received and nobody waits in a circle, which no size changes."""
    collective_program(op, algorithm, ranks, ranks, hosts=hosts)


class HopLinks:
    """Links of one rank, with sums and gathers by one algorithm."""

    def __init__(
        self, links: Links, mesh: Mesh, rank: int, algorithm: str, network: Network, name: str = ""
    ) -> None:
        """`name`: begins the names of its messages, so that those of several lanes differ."""
        self._links, self._mesh, self._rank, self._algorithm = links, mesh, rank, algorithm
        self._network, self._name = network, name
        self._counts: dict[tuple[int, ...], int] = {}
        self._open: list[_Hopping] = []
        """Among ranks of one process: what is under way."""
        self.takes_turns = links.takes_turns
        """As the links below have it."""

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective; its hops are made when its result is wanted, or by `advance`."""
        group = self._mesh.group(self._rank, collective.axis)
        algorithm = algorithm_of(self._algorithm, collective, group, self._network)
        if algorithm == BACKEND:
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

        hops: list[HopSpan] = []
        what = f"{collective.op} by {algorithm} of {tensor.nbytes:,} bytes"
        started = _Hopping(self._run(collective, algorithm, group, own, blocks, hops), finish, hops, what)
        if self.takes_turns:
            self._open.append(started)
        return started

    def advance(self) -> None:
        """Make the hops of all that is under way which can be made without waiting for another rank."""
        self._open = [started for started in self._open if not started.ready()]

    def _run(
        self,
        collective: Collective,
        algorithm: str,
        group: tuple[int, ...],
        own: int,
        blocks: Sequence[Tensor],
        hops: list[HopSpan],
    ) -> Iterator[None]:
        number = self._counts[group] = self._counts.get(group, -1) + 1
        sizes = tuple(block.nbytes for block in blocks)
        hosts = self._network.hosts_of(group)
        found = _hops(collective.op, algorithm, sizes, collective.axis, hosts)[own]
        named = [
            replace(i, message=f"{self._name}{number}: {i.message}") if isinstance(i, Send | Recv) else i
            for i in found
        ]
        return run_hops(named, self._links, blocks, _Noted(hops))

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

    def __init__(
        self, turns: Iterator[None], finish: Callable[[], Tensor], hops: list[HopSpan], what: str
    ) -> None:
        self._turns, self._finish, self._what = turns, finish, what
        self.hops = hops
        """The messages so far, for the trace."""
        self._is_over = False

    def ready(self) -> bool:
        if not self._is_over:
            try:
                self._is_over = next(self._turns, self) is self
            except ConnectionError as error:
                raise ConnectionError(f"{self._what}: {error}") from error
        return self._is_over

    def result(self) -> Tensor:
        while not self.ready():
            pass
        return self._finish()


class _Noted:
    """Writes down every message that came, and every sum that was made of one."""

    def __init__(self, hops: list[HopSpan]) -> None:
        self._hops = hops
        self._asked_ns: dict[int, int] = {}
        self._last_ns = time.perf_counter_ns()

    def __call__(self, instruction: Instruction) -> None:
        now_ns = time.perf_counter_ns()
        if isinstance(instruction, Recv):
            self._asked_ns[instruction.id] = now_ns
        elif isinstance(instruction, Wait):
            self._hops.append(
                (instruction.name.removeprefix("wait for "), self._asked_ns[instruction.of], now_ns)
            )
        elif isinstance(instruction, Combine):
            self._hops.append((instruction.name, self._last_ns, now_ns))
        self._last_ns = now_ns


def in_turns(links: Links, plan: Plan, rank: int) -> HopLinks:
    """Links of a rank among others of its process, with the algorithm of a plan; they have no network."""
    nowhere = Network.of(DEVICES["cpu"].cluster("cpu", 1, plan.mesh.size), plan.mesh.size)
    return HopLinks(links, plan.mesh, rank, plan.links.algorithm, nowhere)
