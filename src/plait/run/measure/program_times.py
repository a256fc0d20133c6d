"""Time what a program is made of, on this machine, under the load that a run of it would have.

In: a program, what is known already. Out: seconds of its ops, updates and transfers, by the names in
`program/cost/op_key.py`. As many processes as the program has ranks (of one host) are busy at once, with as many
threads each as in a run. The program itself is not run: how its parts overlap and wait is left to the simulator.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.cluster.cluster import Link
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.job.updates.optimizer_state import Updated
from plait.options import Emulation
from plait.program.cost.op_key import op_key, update_key
from plait.program.cost.update import updated_parts
from plait.program.instructions import Compute
from plait.program.program import Program
from plait.run.measure.compress_times import time_compression
from plait.run.measure.links.transfer_times import mean_of_ranks, time_transfers, transfers_of
from plait.run.measure.op_times import OpTimes, clock_of, time_ops
from plait.run.measure.rehearsal import rehearse
from plait.run.prepare.programs import Programs
from plait.run.setup.allocator import keep_freed_memory
from plait.run.setup.device import choose_device
from plait.run.start.launch import Seat, connect, disconnect, launch
from plait.torch_private import pytree

_UPDATES = 5
"""Optimizer steps that are timed after a first one, which makes the state."""
_MOST_UPDATED = 1 << 31
"""Elements whose update is timed; of more the time is in proportion. Beyond that they may have no room, and each is
long enough for its launch not to count."""
_LIMIT_S = 120.0
"""After which timing counts as hanging: it takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTimes:
    """What was found."""

    seconds: Mapping[str, float]
    """By the names of `op_key`, `update_key` and `transfer_key`."""
    host_s: float
    """Mean time in which the host starts an op of a GPU; zero on a processor."""


def time_program(
    programs: Programs,
    program: Program,
    ranks: int,
    device: str,
    known: Mapping[str, float] | None = None,
    network: tuple[Emulation, Link] | None = None,
) -> ProgramTimes:
    """Time the parts of a program that are not `known`, on as many ranks as a machine has: all of a rank's ops where
    one of them is new. `network`: what is between their hosts, where those are this machine; it is rehearsed then."""
    main = _Main(programs, program, device, known or {}, network)
    if device == "cuda" and ranks == 1:
        found = [main.measure(choose_device(device, 0), 0, 1)]
    else:  # processes of their own: this one stays without threads, so that others can be forked from it
        threads = max(1, (os.cpu_count() or 1) // ranks)
        found = launch(main, ranks=ranks, threads_per_rank=threads, hang_s=_LIMIT_S)
    seconds = mean_of_ranks([entry["seconds"] for entry in found])
    return ProgramTimes(seconds=seconds, host_s=max(entry["host_s"] for entry in found))


class _Main:
    """What every process does. Spawned ones compile again: programs hold functions that do not travel."""

    def __init__(
        self,
        programs: Programs,
        program: Program,
        device: str,
        known: Mapping[str, float],
        network: tuple[Emulation, Link] | None,
    ) -> None:
        self._programs, self._program, self._device, self._known = programs, program, device, known
        self._network = network

    def __getstate__(self) -> dict[str, Any]:
        programs = self._programs
        return {
            "job": programs.job, "plan": programs.plan, "shares": self._program.shares, "device": self._device,
            "known": dict(self._known), "network": self._network,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        job: Job = state["job"]
        source = open_data(job.data, job.collate)
        self._programs = Programs(job, source, state["plan"], torch.device(state["device"]))
        self._program = self._programs.for_sizes(state["shares"])
        self._device, self._known = state["device"], state["known"]
        self._network = state["network"]

    def __call__(self, seat: Seat) -> dict[str, Any]:
        keep_freed_memory()
        if seat.ranks > 1:
            connect(seat, timeout_s=2 * _LIMIT_S)
        try:
            found = self.measure(choose_device(self._device, seat.rank), seat.rank, seat.ranks)
            if self._network is not None:
                emulation, between = self._network
                found["seconds"] |= rehearse(
                    self._programs, self._program, seat.rank, emulation, between, seat.store.peers()
                )
            return found
        finally:
            disconnect()

    def measure(self, device: torch.device, rank: int, ranks: int) -> dict[str, Any]:
        """Seconds by name, as this rank saw them."""
        program, known = self._program, self._known
        own = program.of(rank)
        segments = {i.segment for i in own.instructions if isinstance(i, Compute)}
        wanted = {op_key(node, ranks) for name in segments for node in own.segments[name].nodes}
        ops = OpTimes(seconds={}, host_s=0.0)
        if _anybody(not wanted <= known.keys(), ranks):
            between = dist.barrier if ranks > 1 else _nothing
            ops = time_ops(own, self._batch(rank), device, busy=ranks, between=between)
        seconds = dict(ops.seconds)
        seconds |= time_compression(
            own, program.plan.mesh, program.plan.sync, device, ranks, dist.barrier if ranks > 1 else _nothing
        )
        key, update_s = self._update(device, rank, ranks)
        seconds[key] = update_s
        if ranks > 1 and device.type == "cpu":
            transfers = [e for e in transfers_of(program, ranks) if e.key not in known]
            seconds |= time_transfers(transfers, rank, ranks)
        return {"seconds": seconds, "host_s": ops.host_s}

    def _batch(self, rank: int) -> list[Tensor]:
        """This rank's share of a micro-batch."""
        captures, plan = self._programs.captures, self._program.plan
        units = self._program.shares[0]  # one, where every worker has batches of its own
        count = units[plan.data_coordinate(rank) if len(units) > 1 else 0]
        num_samples = captures.source.num_samples or 1
        batch = captures.source.fetch(torch.arange(count) % num_samples)
        return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]

    def _update(self, device: torch.device, rank: int, ranks: int) -> tuple[str, float]:
        parts = updated_parts(self._program, rank)
        timed, share = _first(parts)
        named = [
            (p.name, nn.Parameter(torch.randn(p.shape, device=device).to(p.dtype) * 0.02)) for p in timed
        ]
        key, step = update_key("none", [], ranks), _nothing
        if named:
            optimizer = self._programs.job.build_optimizer(named)
            key = update_key(type(optimizer).__name__, [part.shape for part in parts], ranks)
            for _, parameter in named:
                parameter.grad = torch.full_like(parameter, 1e-3)
            step = optimizer.step
        times: list[float] = []
        clock = clock_of(device)
        for _ in range(_UPDATES + 1):  # who has nothing to update is waited for, too
            if ranks > 1:
                dist.barrier()
            clock.begin()
            clock.time(step, (), {})
            times += clock.end()[0]
        return key, median(times[1:]) / share if named else 0.0


def _first(parts: Sequence[Updated]) -> tuple[list[Updated], float]:
    """So many of them that they have room with all that an optimizer keeps, and their share of all elements."""
    taken, held = list[Updated](), 0
    for part in parts:
        if taken and held + math.prod(part.shape) > _MOST_UPDATED:
            break
        taken.append(part)
        held += math.prod(part.shape)
    everything = sum(math.prod(part.shape) for part in parts)
    return taken, held / everything if everything else 1.0


def _anybody(wants: bool, ranks: int) -> bool:
    """Whether one of the ranks wants to, as all of them learn."""
    if ranks == 1:
        return wants
    told = torch.tensor([float(wants)])
    dist.all_reduce(told)
    return bool(told.item() > 0)


def _nothing() -> None:
    """Who is alone waits for nobody."""
