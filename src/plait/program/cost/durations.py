"""How long every instruction of a compiled program takes on a cluster.

In: a program, a cluster, what the optimizer has to do. Out: durations for `simulate`. An op, an update or an exchange
that was timed on the device itself takes as long as it took there; everything else follows from the device's rates and
links. It never runs anything, and knows nothing of overlap: that is the simulator's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from plait.cluster.cluster import Cluster, Link, Reach
from plait.errors import ProgramError
from plait.plan.plan import DATA
from plait.program.cost.brought import brought
from plait.program.cost.collective_time import Travel, collective_travel, level_work_s, message_seconds
from plait.program.cost.fused import fused_shares
from plait.program.cost.held import held_up
from plait.program.cost.op_key import compress_key, op_key, rehearsed_prefix, transfer_key
from plait.program.cost.op_time import node_work, op_seconds
from plait.program.cost.traffic import filled_in_place, memory_bytes
from plait.program.cost.update import UpdateWork
from plait.program.instructions import (
    Collective,
    Compress,
    Compute,
    Copy,
    Decompress,
    Exchange,
    Instruction,
    Load,
    Opaque,
    Pull,
    Push,
    PushBuffers,
    Recv,
    Send,
    Serve,
    Update,
)
from plait.program.program import Program


class Durations:
    """Seconds by rank and instruction: what `simulate` takes."""

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        updates: Mapping[int, UpdateWork],
        by_hops: Callable[[Collective, tuple[int, ...]], Travel | None] = lambda collective, group: None,
    ) -> None:
        """`updates`: by class of ranks; `by_hops`: how long a collective of some ranks takes that is made hop by hop,
        in the background; None: it is not."""
        self._by_hops = by_hops
        self._program, self._cluster, self._updates = program, cluster, updates
        self._device = cluster.device
        self._busy = min(program.plan.mesh.size, cluster.devices_per_machine)
        self._launchers = program.plan.ranks // program.plan.processes
        """Ranks that share an interpreter, which launches one op at a time."""
        self._segments: dict[tuple[int, str], float] = {}
        self._transfers: dict[tuple[object, ...], Travel] = {}
        self._held: dict[int, dict[int, float]] = {}
        self._filled = [filled_in_place(own) for own in program.classes]
        self._rehearsed = _rehearsed(program, self._busy, cluster.device.timed)

    def duration(self, rank: int, instruction: Instruction) -> float:
        """Seconds that an instruction takes, without waiting."""
        if isinstance(instruction, Compute):
            return self._compute(rank, instruction)
        rehearsed = self._rehearsed_s(rank, instruction)
        if rehearsed is not None and instruction.lane == "compute" and not isinstance(instruction, Send):
            return rehearsed
        if isinstance(instruction, Send):
            seconds = self._message(instruction.num_bytes, self._peers(rank, instruction))
            # On links without a background only the sender's copy is over before the receiver does its part.
            return seconds if self._in_background(rank, instruction) else seconds / 2
        if isinstance(instruction, Collective):
            if not self._in_background(rank, instruction):
                return 0.0
            travel = self._travel(rank, instruction)
            return max(travel.wire_s, travel.shared_s(self._held_s(rank, instruction))) + travel.latency_s
        if isinstance(instruction, Opaque):
            raise ProgramError("the model was not captured: nobody knows how long it takes.")
        if isinstance(instruction, Update):
            return self._update(rank, instruction)
        if isinstance(instruction, Copy):
            return self._copy_s(instruction)
        if isinstance(instruction, Push | PushBuffers | Pull | Exchange):
            return self._with_servers(rank, instruction)
        if isinstance(instruction, Load) and instruction.num_bytes:
            inner = self._cluster.link_among(self._program.plan.mesh.group(rank, DATA)).inner
            return message_seconds(instruction.num_bytes, inner, self._device)
        if isinstance(instruction, Compress | Decompress):
            bucket = self._program.of(rank).buckets[instruction.bucket]
            timed = self._device.timed.get(
                compress_key(instruction, bucket, self._program.plan.sync, self._busy)
            )
            if timed is not None:
                return timed
        member = self._program.members[rank]
        traffic = memory_bytes(self._program.of(rank), instruction, self._filled[member])
        if isinstance(instruction, Serve) and "push" in instruction.handlers:
            return self._updates[member].seconds(self._device, self._busy)
        constants = self._device.calibration
        return traffic / (self._device.memory_bandwidth * constants.memory_share) + constants.kernel_s

    def latency(self, rank: int, collective: Instruction) -> float:
        """Seconds of a collective's duration for which it does not need the wire."""
        assert isinstance(collective, Collective)
        return self._travel(rank, collective).latency_s if self._in_background(rank, collective) else 0.0

    def at_start(self, rank: int, started: Instruction) -> float:
        """Seconds for which a rank's processor works before what it starts in the background is on the wire."""
        if isinstance(started, Send):
            return self._rehearsed_s(rank, started) or 0.0
        if not isinstance(started, Collective) or not self._in_background(rank, started):
            return 0.0
        return self._travel(rank, started).edge_s

    def own_part(self, rank: int, started: Instruction) -> float:
        """Seconds for which a rank works itself where it waits for what it has started: without a background, for all
        of it; else, for what is left when the last byte has come."""
        if isinstance(started, Copy):
            return 0.0 if self._device.host_bandwidth else self._copy_s(started)
        if isinstance(started, Update):
            return 0.0 if self._device.host_bandwidth else self._update(rank, started)
        if isinstance(started, Pull | Exchange):
            return 0.0 if self._to_servers.background else self._served_s(started) / 2
        assert isinstance(started, Collective | Recv)
        if isinstance(started, Recv):
            seconds = self._message(started.num_bytes, self._peers(rank, started))
            rehearsed = self._rehearsed_s(rank, started)
            if rehearsed is not None:
                return rehearsed
            return 0.0 if self._in_background(rank, started) else seconds / 2
        travel = self._travel(rank, started)
        return travel.edge_s if self._in_background(rank, started) else travel.total_s

    def _copy_s(self, instruction: Copy) -> float:
        """Over the bus; where host and device are one memory, by the device itself, which reads and writes."""
        device, constants = self._device, self._device.calibration
        if instruction.way == "drop":
            return 0.0
        if device.host_bandwidth:
            return instruction.num_bytes / device.host_bandwidth + constants.kernel_s
        return 2 * instruction.num_bytes / (device.memory_bandwidth * constants.memory_share)

    def _update(self, rank: int, instruction: Update) -> float:
        """All of it, or the share of its bytes that a part has, and what every part costs beside."""
        work = self._updates[self._program.members[rank]]
        if instruction.lane == "host" and self._device.host_bandwidth:
            whole = work.traffic / self._device.processor_bandwidth
        else:
            whole = work.seconds(self._device, self._busy)
        if not instruction.parts:
            return whole
        buckets = self._program.of(rank).buckets
        total = sum(bucket.num_bytes for bucket in buckets if bucket.parameters)
        own = sum(buckets[index].num_bytes for index in instruction.parts)
        return whole * own / total + self._device.calibration.kernel_s

    def beside(self, rank: int, started: Instruction) -> float:
        """Seconds of a rank's processor that what it has started in the background takes while it travels: from what is
        computed meanwhile, unless the rank has nothing to do."""
        if not isinstance(started, Collective) or not self._in_background(rank, started):
            return 0.0
        return self._travel(rank, started).between_s

    def _held_s(self, rank: int, collective: Collective) -> float:
        """Seconds for which a rank computes while its processor has work with a collective that is under way."""
        entry = self._program.members[rank]
        if entry not in self._held:
            self._held[entry] = held_up(
                self._program.of(rank).instructions,
                lambda started: self._travel(rank, started).work_s,
                lambda compute: self._compute(rank, compute),
            )
        return self._held[entry].get(collective.id, 0.0)

    @cached_property
    def _to_servers(self) -> Link:
        """The slowest link between a worker and a server."""
        ranks = min(self._program.plan.ranks, self._cluster.size)
        reach = self._cluster.link_among(tuple(range(ranks)))
        return reach.outer if reach.hosts > 1 else reach.inner

    def _served_s(self, instruction: Instruction) -> float:
        """Seconds for which what a worker and one of the servers send each other travels."""
        servers = 1 if isinstance(instruction, PushBuffers | Exchange) else self._program.plan.sync.servers
        return message_seconds(instruction.num_bytes // servers, self._to_servers, self._device)

    def _with_servers(self, rank: int, instruction: Push | PushBuffers | Pull | Exchange) -> float:
        """What a worker's message costs it, or the server: a copy each on links without a background, else the server
        the time for which it travels, since all workers share the way to it."""
        is_server = rank >= self._program.plan.mesh.size
        seconds = self._served_s(instruction)
        if self._to_servers.background:
            return seconds if is_server else 0.0
        return seconds / 2 if is_server or not isinstance(instruction, Pull) else 0.0

    def _compute(self, rank: int, instruction: Compute) -> float:
        rehearsed = self._rehearsed_s(rank, instruction)
        if rehearsed is not None:
            return rehearsed
        key = (self._program.members[rank], instruction.segment)
        if key not in self._segments:
            device = self._device
            seconds, num_ops = 0.0, 0
            segment = self._program.of(rank).segments[instruction.segment]
            is_compiled = self._program.plan.compile in ("on", "before")
            shares = fused_shares(segment.nodes, segment.outputs) if is_compiled else {}
            for node in segment.nodes:
                share = shares.get(node, 1.0)
                timed = device.timed.get(op_key(node, self._busy)) if device.timed else None
                work = node_work(node) if timed is None else None
                if timed is not None:
                    seconds += timed * share
                elif work is not None:
                    seconds += op_seconds(work, device) * share
                num_ops += 1 if share and (timed is not None or work is not None) else 0
            self._segments[key] = max(seconds, num_ops * device.calibration.host_s * self._launchers)
        return self._segments[key]

    def _peers(self, rank: int, instruction: Send | Recv) -> tuple[int, int]:
        group = self._program.plan.mesh.group(rank, instruction.axis)
        other = instruction.to if isinstance(instruction, Send) else instruction.source
        return rank, group[other]

    def _travel(self, rank: int, instruction: Collective) -> Travel:
        """From the last arrival to the end."""
        mesh = self._program.plan.mesh
        coordinates = tuple(mesh.coordinate(rank, name) for name, _ in mesh.axes)
        dtype = brought(self._program, self._program.of(rank), instruction)[1]
        key = (
            instruction.op,
            instruction.axis,
            instruction.num_bytes,
            dtype,
            instruction.source and instruction.source.kind,
            coordinates,
        )
        if key not in self._transfers:
            group = mesh.group(rank, instruction.axis)
            reach = self._reach(group)
            key_of_time = transfer_key(instruction, len(group), self._busy)
            found = self._by_hops(instruction, group)
            if found is not None and reach.hosts > 1:
                found = found._replace(work_s=level_work_s(instruction.num_bytes, reach.outer))
            if found is None and reach.hosts == 1 and key_of_time in self._device.timed:
                found = Travel(self._device.timed[key_of_time])
            if found is None and instruction.op.startswith("halo"):
                found = Travel(self._message(instruction.num_bytes, group[:2]))
            if found is None:
                found = collective_travel(
                    instruction.op,
                    instruction.num_bytes,
                    reach,
                    self._device,
                    levels=not self._by_sockets,
                    packs=dtype == torch.float32,
                )
            self._transfers[key] = found
        found, work_s = self._transfers[key], self._rehearsed_s(rank, instruction)
        return found if work_s is None else found._replace(work_s=work_s)

    def _rehearsed_s(self, rank: int, instruction: Instruction) -> float | None:
        """Seconds of a processor in steps that were made; None: none were."""
        if not self._rehearsed:
            return None
        entry = self._program.members[rank]
        return self._rehearsed.get(f"{entry}: {type(instruction).__name__} {instruction.name}")

    @property
    def _by_sockets(self) -> bool:
        """Whether ranks of one host do not meet in its memory."""
        return self._program.plan.links.transport == "sockets" and self._cluster.between.direct

    def _reach(self, ranks: Sequence[int]) -> Reach:
        """What these ranks cross; those of one host that have sockets alone, as if each were a host."""
        reach = self._cluster.link_among(ranks)
        return (
            replace(reach, hosts=reach.size, per_host=1) if self._by_sockets and reach.hosts == 1 else reach
        )

    def _message(self, num_bytes: int, ends: tuple[int, ...]) -> float:
        if len(set(ends)) < 2:
            return 0.0
        reach = self._reach(ends)
        timed = self._device.timed.get(f"{self._busy}|send {num_bytes}") if reach.hosts == 1 else None
        if timed is not None:
            return timed
        return message_seconds(num_bytes, reach.outer if reach.hosts > 1 else reach.inner, self._device)

    def _in_background(self, rank: int, instruction: Collective | Send | Recv) -> bool:
        mesh = self._program.plan.mesh
        group = mesh.group(rank, instruction.axis)
        if isinstance(instruction, Collective) and self._by_hops(instruction, group) is not None:
            return True
        reach = self._reach(group)
        return reach.outer.background if reach.hosts > 1 else reach.inner.background


def _rehearsed(program: Program, busy: int, timed: Mapping[str, float]) -> Mapping[str, float]:
    """What was rehearsed of this program."""
    if not any("|rehearsed " in key for key in timed):
        return {}
    prefix = rehearsed_prefix(program, busy)
    return {key.removeprefix(prefix): seconds for key, seconds in timed.items() if key.startswith(prefix)}
