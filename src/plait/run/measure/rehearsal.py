"""Rehearse a program between emulated hosts: how much of a processor each instruction takes with all ranks at work.

In: a program, an emulated network. Out: on each rank seconds by `rehearsed_key`. Steps are made on the links of a run,
and only processor time is counted: of a rank's own thread by instruction, of its other threads, which send, receive and
sum, by what is under way between hosts, in the shares that the link's law gives. When anything happens, who waits for
whom and what the network takes is not looked at: that is the simulator's. Timed one by one the same parts take less:
caches are warm there, and threads do not take turns. Where ranks are more than processors, processor time counts as
often as these are shared.
"""

import os
import time
from collections.abc import Mapping, Sequence, Set

import torch
import torch.distributed as dist

from plait.cluster.cluster import Link
from plait.job.data.share import Share
from plait.options import Emulation
from plait.program.cost.collective_time import level_work_s
from plait.program.cost.op_key import rehearsed_key
from plait.program.instructions import Collective, Compute, Instruction, Recv, Send, Wait
from plait.program.program import Program
from plait.run.hold.state import ModelState
from plait.run.interpret.machine import Machine
from plait.run.link.between import links_of_plan
from plait.run.prepare.programs import Programs
from plait.run.wire.emulate import Wire
from plait.run.wire.peers import Peers

_CPU = torch.device("cpu")
_FIRST = 3
"""Steps that do not count: memory is taken, kernels are chosen, threads start."""
_STEPS, _AIM_S = 12, 4.0
"""Steps that count: so many, or fewer where they would take longer, but one."""
_TIMEOUT_S = 60.0
"""After which links count as hanging."""
Key = tuple[type[Instruction], str]


class _Counts:
    """An observer that adds up what a rank's own thread takes of processors."""

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}
        """By kind and name of an instruction; what waits for it is a part of what was started."""
        self.times: dict[Key, int] = {}
        """How often each was met."""
        self._started: dict[int, Key] = {}
        self._began_s = 0.0

    def entering(self, step: int, instruction: Instruction, waiting: bool) -> None:
        """Called before an instruction."""
        self._began_s = time.thread_time()

    def done(self, step: int, instruction: Instruction, start_ns: int, end_ns: int) -> None:
        """Called after an instruction."""
        spent_s = time.thread_time() - self._began_s
        if isinstance(instruction, Wait):
            key = self._started[instruction.of]
        else:
            key = self._started[instruction.id] = type(instruction), instruction.name
            self.times[key] = self.times.get(key, 0) + 1
        self.seconds[key] = self.seconds.get(key, 0.0) + spent_s

    def hopped(self, step: int, hops: object) -> None:
        """Messages of collectives are made by other threads."""


def rehearse(
    programs: Programs, program: Program, rank: int, emulation: Emulation, between: Link, peers: Peers
) -> dict[str, float]:
    """Seconds by key, as this rank saw them; all ranks must be here, in one process group, which is slow afterwards."""
    plan, job = programs.plan, programs.job
    os.environ["PLAIT_HOST"] = f"emulated {emulation.host_of(rank)}"
    peers.emulate(Wire.between(emulation, rank))
    links = links_of_plan(plan, rank, _CPU, timeout_s=_TIMEOUT_S, emulation=emulation)
    state = ModelState(job, _CPU, torch.float32, programs.holding(rank, links, _CPU))
    state.lay_beside(program.beside)
    state.narrow = bool(programs.captures.narrow)
    shares = _shares(programs, program, rank)
    machine = Machine(rank, state, links, _Counts())
    with torch.no_grad():
        machine.begin(program)
        _steps(machine, program, shares, _FIRST - 1)
        began = time.perf_counter()
        _steps(machine, program, shares, 1)
        count = _agreed(_AIM_S / (time.perf_counter() - began))
        machine.observer = counts = _Counts()
        others_s = time.thread_time() - time.process_time()
        _steps(machine, program, shares, count)
        others_s += time.process_time() - time.thread_time()
    away = _between_hosts(program, rank, emulation)
    laws = {key: counts.times[key] * level_work_s(size, between) for key, size in away.items()}
    others = {key: others_s * law / sum(laws.values()) for key, law in laws.items()}
    crowd = max(1.0, emulation.ranks / (os.cpu_count() or 1))
    return {
        rehearsed_key(program, rank, *key, emulation.ranks): crowd
        * (counts.seconds[key] + others.get(key, 0.0))
        / counts.times[key]
        for key in _kept(program, rank) | away.keys()
    }


def _steps(machine: Machine, program: Program, shares: Sequence[Share], count: int) -> None:
    for _ in range(count):
        for _ in machine.execute(program, 0, shares):
            raise AssertionError("a process waits inside its links, never outside")


def _agreed(count: float) -> int:
    """How many steps count, as all ranks say."""
    told = torch.tensor([min(float(_STEPS), max(1.0, count))])
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return int(told.item())


def _kept(program: Program, rank: int) -> Set[Key]:
    """What a rank does itself, messages in memory too; compiled segments are left to the times of their ops."""
    compiled = program.plan.compile in ("on", "before")
    return {
        (type(instruction), instruction.name)
        for instruction in program.of(rank).instructions
        if (instruction.lane == "compute" or isinstance(instruction, Send | Recv))
        and not isinstance(instruction, Wait)
        and not (compiled and isinstance(instruction, Compute))
    }


def _between_hosts(program: Program, rank: int, emulation: Emulation) -> Mapping[Key, int]:
    """What a rank sends to other hosts or has from them: bytes by kind and name."""
    mesh, found = program.plan.mesh, dict[Key, int]()
    for instruction in program.of(rank).instructions:
        if not isinstance(instruction, Collective | Send | Recv):
            continue
        group = mesh.group(rank, instruction.axis)
        if isinstance(instruction, Send | Recv):
            group = (rank, group[instruction.to if isinstance(instruction, Send) else instruction.source])
        if len({emulation.host_of(member) for member in group}) > 1:
            found[type(instruction), instruction.name] = instruction.num_bytes
    return found


def _shares(programs: Programs, program: Program, rank: int) -> list[Share]:
    """This rank's samples of a step, shaped like the first one."""
    plan, captures, first = program.plan, programs.captures, 0
    found: list[Share] = []
    total = captures.source.num_samples or 1
    at = plan.data_coordinate(rank)
    for sizes in program.shares:
        alone = len(sizes) == 1
        offset, count = (0, sizes[0]) if alone else (sum(sizes[:at]), sizes[at])
        start = first + (at * count if alone else offset)
        ids = torch.arange(start, start + count) % total
        batch = captures.source.fetch(ids)
        if count and captures.extents(batch) != captures.extents(captures.example):
            batch = captures.source.fetch(torch.zeros_like(ids))
        own = tuple(ids.tolist())
        found.append(Share(batch=batch, ids=own, sizes=sizes, offset=offset, global_offset=first))
        first += sum(sizes)
    return found
