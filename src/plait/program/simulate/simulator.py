"""The simulator: interprets a program by advancing clocks.

In: a program and how long each instruction takes. Out: a `Trace` of the same kind as a measured one. A rank's lanes are
queues: an instruction starts when its lane is free and what it waits for is done; a collective starts when every rank
of its group has issued it and lasts equally long for all; others may have the wire while it waits for its latency, but
for those of its own lane, where the plan has lanes; a message leaves when it is sent and the one before it, to the same
rank, has arrived; a server handles one message after the other (`served.py`).
"""

from collections import deque
from collections.abc import Sequence

from plait.errors import ProgramError
from plait.program.check.walk import Peers
from plait.program.instructions import (
    Collective,
    Copy,
    Exchange,
    Instruction,
    Pull,
    Push,
    PushBuffers,
    Recv,
    Send,
    Update,
    Wait,
)
from plait.program.program import Program
from plait.program.simulate.event_clock import Clock, Duration, Key, Turn
from plait.program.simulate.fold import representatives
from plait.program.simulate.served import Message, Queue, serving
from plait.trace.span import Trace

_REMEMBERED = 64
"""Copies of each way that one of the other way may still meet."""


class _Run:
    """One simulated run."""

    def __init__(
        self,
        programs: Sequence[Program],
        duration: Duration,
        latency: Duration,
        at_start: Duration,
        own_part: Duration,
        beside: Duration,
        duplex: float,
        steps: int,
        fold: Sequence[int] | None,
        processors: int | None,
    ) -> None:
        self.plan = programs[0].plan
        self.clock = Clock(self.plan.ranks, duration, processors)
        self.ranks = tuple(range(self.plan.ranks) if fold is None else sorted(set(fold)))
        self._programs, self._steps, self._fold = programs, steps, fold
        self._latency, self._at_start, self._own_part, self._beside = latency, at_start, own_part, beside
        self._lanes = self.plan.links.lanes
        self._takes_next, self._workers = self.plan.agreement.takes_next, self.plan.mesh.size
        self._peers = Peers(self.plan.mesh, fold)
        self._communication_s = [0.0] * self.plan.ranks
        self._lanes_s: dict[Key, float] = {}
        self._links_s: dict[Key, float] = {}
        self._host_s: dict[Key, float] = {}
        """By rank, and by way or by value: when the way is free again, when the host has the value."""
        self._duplex = duplex
        self._used: dict[Key, deque[tuple[float, float]]] = {}
        """By rank and way: when it was used last."""
        self._arrived: dict[Key, list[tuple[int, int, Collective, float]]] = {}
        self._posted: dict[Key, tuple[int, int, Recv, float]] = {}
        self._counts: dict[tuple[int, Key], int] = {}
        self._queues = [Queue(rank) for rank in self.ranks if rank >= self._workers]
        self._tickets = iter(range(steps * self._workers))
        self._stands: dict[int, Wait] = {}

    def run(self) -> None:
        """Until nobody can go on."""
        stuck = self.clock.run({rank: self._rank(rank) for rank in self.ranks})
        if stuck:
            told = ", ".join(
                f"rank {rank} in {self._stands[rank].name}" for rank in stuck if rank in self._stands
            )
            raise ProgramError(f"the program deadlocks: {told}.")

    def _rank(self, rank: int) -> Turn:
        own = self._programs[0].of(rank)
        for instruction in own.prologue:
            yield from self.clock.local(rank, 0, instruction)
        if own.serve is not None:
            queue = self._queues[rank - self._workers]
            yield from serving(self.clock, queue, own.serve, self._programs[-1].of(0), self._workers)
            return
        count = step = 0
        while True:
            if self._takes_next:
                yield self.clock.now_s[rank]
                ticket = next(self._tickets, None)
                if ticket is None:
                    break
                step = ticket // self._workers
            elif count == self._steps:
                break
            else:
                step = count
            yield from self._step(rank, step, self._programs[count % len(self._programs)])
            count += 1
        for instruction in own.epilogue:
            yield from self._post(rank, step, instruction)

    def _step(self, rank: int, step: int, program: Program) -> Turn:
        clock, asked, asked_s = self.clock, -1, 0.0
        now_s, ends_s = clock.now_s, clock.ends_s
        under_way: dict[int, tuple[Instruction, tuple[Key, ...]]] = {}
        for instruction in program.of(rank).instructions:
            if isinstance(instruction, Wait):
                started, keys = under_way.pop(instruction.of)
                for key in keys:
                    if key not in ends_s:
                        self._stands[rank] = instruction
                        yield key
                start_s = now_s[rank]
                yield from clock.busy(rank, self._beside(rank, started))
                now_s[rank] = max(now_s[rank], *(ends_s[key] for key in keys))
                yield from clock.busy(rank, self._own_part(rank, started))
                end_s = now_s[rank]
                if isinstance(started, Pull):
                    clock.span(rank, step, started, asked_s, end_s)
                clock.span(rank, step, instruction, start_s, end_s)
            elif isinstance(instruction, Collective):
                yield from clock.busy(rank, self._at_start(rank, instruction))
                under_way[instruction.id] = instruction, (self._meet(rank, step, instruction),)
            elif isinstance(instruction, Send):
                yield from clock.busy(rank, self._at_start(rank, instruction))
                self._send(rank, step, instruction)
            elif isinstance(instruction, Recv):
                under_way[instruction.id] = instruction, (self._receive(rank, step, instruction),)
            elif isinstance(instruction, Pull):
                if asked < 0:  # for all buckets at once
                    asked, asked_s = self._count(rank, ("pull",)), now_s[rank]
                    yield from self._post(rank, step, instruction, asked)
                keys = tuple(queue.weights(rank, instruction.bucket, asked) for queue in self._queues)
                under_way[instruction.id] = instruction, keys
            elif isinstance(instruction, Exchange):
                number = self._count(rank, ("exchange",))
                yield from self._post(rank, step, instruction, number)
                under_way[instruction.id] = instruction, (self._queues[0].center(rank, number),)
            elif isinstance(instruction, Copy):
                under_way[instruction.id] = instruction, (self._copy(rank, step, instruction),)
            elif isinstance(instruction, Update) and instruction.lane == "host":
                under_way[instruction.id] = instruction, (self._update(rank, step, instruction),)
            elif isinstance(instruction, Push | PushBuffers):
                yield from self._post(rank, step, instruction)
            else:
                yield from clock.local(rank, step, instruction)

    def _count(self, rank: int, key: Key) -> int:
        number = self._counts[rank, key] = self._counts.get((rank, key), -1) + 1
        return number

    def _meet(self, rank: int, step: int, instruction: Collective) -> Key:
        """Arrive at a collective; it runs on the communication lanes of the group once everybody is there."""
        group = self._peers.group(rank, instruction.axis)
        meeting: Key = (group,) if self._fold is None else (group, instruction.axis)
        number = self._count(rank, meeting)
        key: Key = (*meeting, number)
        arrived = self._arrived.setdefault(key, [])
        arrived.append((rank, step, instruction, self.clock.now_s[rank]))
        if len(arrived) == len(group):
            wires, duration_s = self._communication_s, self.clock.duration(group[0], instruction)
            latency_s = self._latency(group[0], instruction)
            lane: Key = (*meeting, number % self._lanes) if self._lanes else ()
            start_s = max(max(at_s, wires[member]) for member, _, _, at_s in arrived)
            if lane:
                start_s = max(start_s, self._lanes_s.get(lane, 0.0))
            end_s = self._lanes_s[lane] = start_s + duration_s
            for member, of_step, own, at_s in self._arrived.pop(key):
                wires[member] = end_s - latency_s
                self.clock.span(member, of_step, own, at_s, end_s)
            self.clock.happen(key, end_s)
        return key

    def _send(self, rank: int, step: int, instruction: Send) -> None:
        """Put a message on its way; on the compute lane, handing it over takes no time."""
        clock, message = self.clock, self._peers.message(rank, instruction)
        key, link, now_s = (*message, self._count(rank, message)), message[:2], clock.now_s[rank]
        start_s = max(now_s, self._links_s.get(link, 0.0))
        end_s = self._links_s[link] = start_s + clock.duration(rank, instruction)
        clock.span(rank, step, instruction, now_s, end_s if instruction.lane == "communication" else now_s)
        if key in self._posted:
            receiver, of_step, recv, posted_s = self._posted.pop(key)
            clock.span(receiver, of_step, recv, posted_s, max(posted_s, end_s))
        clock.happen(key, end_s)

    def _receive(self, rank: int, step: int, instruction: Recv) -> Key:
        clock, message = self.clock, self._peers.message(rank, instruction)
        key, now_s = (*message, self._count(rank, message)), clock.now_s[rank]
        if key in clock.ends_s:
            clock.span(rank, step, instruction, now_s, max(now_s, clock.ends_s[key]))
        else:
            self._posted[key] = (rank, step, instruction, now_s)
        return key

    def _copy(self, rank: int, step: int, instruction: Copy) -> Key:
        """Each way has a queue of its own; what is fetched must have been stored. Without a way of its own between the
        two memories, the rank itself copies."""
        clock, way = self.clock, (rank, instruction.way)
        stored = (*instruction.reads, *instruction.writes)
        start_s = max(clock.now_s[rank], self._host_s.get(way, 0.0))
        if instruction.way == "in":
            start_s = max([start_s, *(self._host_s.get((rank, value), 0.0) for value in instruction.reads)])
        end_s = self._over_bus(rank, instruction, start_s)
        if self._own_part(rank, instruction) > 0:
            if instruction.way == "in":  # when it waits for it
                end_s = start_s
            clock.now_s[rank] = end_s
        self._host_s[way] = end_s
        self._host_s.update({(rank, value): end_s for value in stored if value.kind == "stored"})
        clock.span(rank, step, instruction, start_s, end_s)
        key: Key = (rank, step, instruction.id)
        clock.happen(key, end_s)
        return key

    def _over_bus(self, rank: int, copy: Copy, start_s: float) -> float:
        """When a copy is over; of two that pass each other, the later one bears what both lose by it."""
        if copy.way == "drop":
            return start_s
        end_s = start_s + self.clock.duration(rank, copy)
        against = self._used.get((rank, "out" if copy.way == "in" else "in"), ())
        both_s = sum(max(0.0, min(end_s, until_s) - max(start_s, since_s)) for since_s, until_s in against)
        end_s += 2 * (1 / self._duplex - 1) * both_s
        self._used.setdefault((rank, copy.way), deque(maxlen=_REMEMBERED)).append((start_s, end_s))
        return end_s

    def _update(self, rank: int, step: int, instruction: Update) -> Key:
        """By the host, one after the other, when it has the gradients; or by the rank itself when it waits for it."""
        clock = self.clock
        needs = [(rank, "processor"), *((rank, value) for value in instruction.reads)]
        start_s = max([clock.now_s[rank], *(self._host_s.get(key, 0.0) for key in needs)])
        own = self._own_part(rank, instruction) > 0
        end_s = start_s if own else start_s + clock.duration(rank, instruction)
        self._host_s[rank, "processor"] = end_s
        self._host_s.update({(rank, value): end_s for value in instruction.writes})
        clock.span(rank, step, instruction, start_s, end_s)
        key: Key = (rank, step, instruction.id)
        clock.happen(key, end_s)
        return key

    def _post(self, rank: int, step: int, instruction: Instruction, number: int = 0) -> Turn:
        """Send something to the servers, in the order of time; buffers go to the first one alone."""
        if not isinstance(instruction, Pull):
            yield from self.clock.local(rank, step, instruction)
        sent_s = self.clock.now_s[rank]
        yield sent_s
        for queue in self._queues[:1] if isinstance(instruction, PushBuffers) else self._queues:
            message = Message(worker=rank, step=step, sent_s=sent_s, instruction=instruction, number=number)
            queue.take(self.clock, message)


def simulate(
    program: Program | Sequence[Program],
    duration: Duration,
    *,
    steps: int = 1,
    folded: bool = False,
    latency: Duration = lambda rank, collective: 0.0,
    at_start: Duration = lambda rank, started: 0.0,
    own_part: Duration = lambda rank, started: 0.0,
    beside: Duration = lambda rank, started: 0.0,
    duplex: float = 1.0,
    processors: int | None = None,
) -> Trace:
    """Run `steps` steps of all ranks on clocks, in a time that grows as the number of instructions does.

    Several programs are those of a worker's consecutive steps, again and again: of workers that average now and then, a
    round. `latency` is for how long of its duration a collective does not need the wire. Of a rank's own processor,
    communication takes `at_start` before it is under way, `own_part` where it is waited for and has come, and `beside`
    between these: of what the rank computes meanwhile, unless it waits. `duplex` is the share of the way between device
    and host that each direction has while both are used. `processors`: those that all ranks share; durations are then
    of ranks that all work at once, and who works while others wait is quicker. `folded`: only one rank of each class is
    stepped through, and the trace shows these alone, unless processors are shared. It says the same where durations do
    not differ within a class.
    """
    programs = [program] if isinstance(program, Program) else program
    plan = programs[0].plan
    is_shared = processors is not None and processors < plan.ranks
    fold = representatives(programs[0]) if folded and not is_shared else None
    run = _Run(programs, duration, latency, at_start, own_part, beside, duplex, steps, fold, processors)
    run.run()
    return Trace(
        spans=tuple(run.clock.spans),
        ranks=run.ranks,
        source="simulated",
        metadata={"plan": plan.name, "mesh": dict(plan.mesh.axes)},
    )
