"""Time for how long collectives between emulated hosts keep the processors of ranks busy.

In: a program, an emulated network. Out: on each rank seconds by `work_key`. Ranks make the collectives of the program
on the links of a run, some at once, and compute after each start, as in a step: threads that take turns with who
computes cost more than those of a rank that waits. What their processes, with all of their threads, take of processors
meanwhile, without what they compute, is what they would take from the computation. Where ranks are more than
processors, it counts as often as these are shared.
"""

import os
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from plait.options import Emulation
from plait.plan.plan import Plan
from plait.program.cost.op_key import work_key
from plait.program.instructions import Collective
from plait.run.link.between import links_of_plan
from plait.run.measure.links.transfer_times import TimedTransfer
from plait.run.wire.emulate import Wire
from plait.run.wire.peers import Peers

_CPU = torch.device("cpu")
_AT_ONCE = 4
"""Collectives that are under way together, as those of a step are."""
_ROUNDS = 4
"""Of so many; the first does not count."""
_COMPUTED_S = 0.002
"""Of the processor, after each start: about as long as a layer or two of the models that have so small a step."""
_EXTENT = 128
"""Of the products that it computes: some tens of microseconds each, as most ops of such a step."""
_TIMEOUT_S = 60.0
"""After which links count as hanging: a collective takes milliseconds."""


def time_work(
    transfers: Sequence[TimedTransfer], plan: Plan, rank: int, emulation: Emulation, peers: Peers
) -> dict[str, float]:
    """Seconds by key, as this rank saw them; all ranks must be here, in one process group, which is slow afterwards."""
    crowd = max(1.0, emulation.ranks / (os.cpu_count() or 1))
    os.environ["PLAIT_HOST"] = f"emulated {emulation.host_of(rank)}"
    peers.emulate(Wire.between(emulation, rank))
    links = links_of_plan(plan, rank, _CPU, timeout_s=_TIMEOUT_S, emulation=emulation)
    found: dict[str, float] = {}
    for transfer in transfers:
        collective = transfer.instruction
        if not isinstance(collective, Collective):
            continue
        hosts = {emulation.host_of(member) for member in plan.mesh.group(rank, collective.axis)}
        count = torch.Size(transfer.shape).numel()
        if len(hosts) < 2 or count * transfer.dtype.itemsize == 0:
            continue
        gathers = transfer.placed and collective.op == "all_gather"
        tensors = [
            (
                links.buffer(count, transfer.dtype, _CPU, collective.axis)
                if transfer.placed
                else torch.empty(transfer.shape, dtype=transfer.dtype)
            ).fill_(1)  # zeros would travel as next to nothing
            for _ in range(_AT_ONCE)
        ]
        outs = [
            torch.empty(count * transfer.size, dtype=transfer.dtype) if gathers else None for _ in tensors
        ]
        times = []
        for _ in range(_ROUNDS):
            dist.barrier()
            began, computed_s, under_way = time.process_time(), 0.0, []
            for own, out in zip(tensors, outs, strict=True):
                under_way.append(links.start(collective, own, out))
                computed_s += _compute()
            for handle in under_way:
                handle.result()
            times.append((time.process_time() - began - computed_s) / _AT_ONCE)
        found[work_key(collective, transfer.size, len(hosts), emulation.ranks)] = crowd * median(times[1:])
    return found


def _compute() -> float:
    """Keep this thread busy; seconds of its own processor time."""
    one, began = torch.ones(_EXTENT, _EXTENT), time.thread_time()
    while time.thread_time() - began < _COMPUTED_S:
        torch.mm(one, one)
    return time.thread_time() - began
