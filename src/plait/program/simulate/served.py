"""The simulator of workers with servers: what comes next is decided by clocks, as it is by time in a run.

In: a program and how long each instruction takes. Out: a `Trace`. A server is a queue: it handles one message after the
other, in the order in which they arrive, under the same rule as a real one. Workers take tickets from one counter, or
their own share of every step. Durations of a server are those of what it handles: of a worker's `Push`, of a `Pull`
(the answer), and of its own `Serve` (one update).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median

from plait.program.instructions import (
    Collective,
    Compute,
    Instruction,
    Opaque,
    Pull,
    Push,
    PushBuffers,
    Serve,
    Wait,
)
from plait.program.program import Program
from plait.program.serve.rule import Rule, rule_of
from plait.program.simulate.event_clock import Clock, Key, Process
from plait.trace.span import Span, Trace

Duration = Callable[[int, Instruction], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What a worker sends."""

    worker: int
    step: int
    instruction: Instruction | None
    """Its push or pull; None: it has left."""
    number: int = 0
    """Of a pull: how many it has asked for before."""


@dataclass(slots=True)
class _Queue:
    """What has arrived at a server."""

    rule: Rule
    messages: deque[_Message] = field(default_factory=deque)
    arrived: int = 0
    parts: dict[int, int] = field(default_factory=dict)
    """By worker: what it has pushed."""
    asks: list[_Message] = field(default_factory=list)
    """Pulls that were not answered yet."""


class _Run:
    """One simulated run."""

    def __init__(self, program: Program, duration: Duration, steps: int, slow: Mapping[int, float]) -> None:
        self.program, self.plan, self.steps = program, program.plan, steps
        self.clock = Clock()
        self.spans: list[Span] = []
        self.ended_s: list[float] = []
        """When each share was done, in order."""
        self._duration, self._slow = duration, slow
        self._tickets = iter(range(steps * self.plan.mesh.size))
        self._queues = [_Queue(rule=rule_of(self.plan, 0)) for _ in range(self.plan.sync.servers)]
        self._met: dict[Key, int] = {}
        self._left = 0

    def run(self) -> None:
        for rank in range(self.plan.mesh.size):
            self.clock.add(self._worker(rank))
        for place in range(self.plan.sync.servers):
            self.clock.add(self._server(place))
        self.clock.run()

    def _places(self) -> Iterator[int]:
        if self.plan.sync.rule != "server-async":
            yield from range(self.steps)
            return
        for ticket in self._tickets:
            yield ticket // self.plan.mesh.size

    def _worker(self, rank: int) -> Process:
        instructions = self.program.of(rank).instructions
        under_way: dict[int, tuple[Key, ...]] = {}
        asked, met = 0, 0
        for step in self._places():
            asks = True
            for instruction in instructions:
                start_s = self.clock.now_s
                match instruction:
                    case Pull():
                        if asks:
                            asked, asks = asked + 1, False
                            self._send(
                                _Message(worker=rank, step=step, instruction=instruction, number=asked)
                            )
                        under_way[instruction.id] = tuple(
                            (place, rank, instruction.bucket, asked) for place in range(len(self._queues))
                        )
                    case Push() | PushBuffers():
                        yield self._duration(rank, instruction)
                        self._send(_Message(worker=rank, step=step, instruction=instruction))
                    case Collective():
                        met += 1
                        under_way[instruction.id] = (self._meet(met, rank, instruction),)
                    case Wait():
                        yield from under_way.pop(instruction.of)
                        yield self._duration(rank, instruction)
                    case _:
                        factor = (
                            self._slow.get(rank, 1.0) if isinstance(instruction, Compute | Opaque) else 1.0
                        )
                        yield factor * self._duration(rank, instruction)
                self._span(rank, step, instruction, start_s)
            self.ended_s.append(self.clock.now_s)
        self._left += 1
        for place in range(len(self._queues)):
            self._arrive(place, _Message(worker=rank, step=self.steps, instruction=None))

    def _meet(self, number: int, rank: int, instruction: Collective) -> Key:
        """Arrive at a collective; it is over a while after the last one has."""
        key: Key = ("meeting", number)
        self._met[key] = self._met.get(key, 0) + 1
        if self._met[key] == self.plan.mesh.size:
            self.clock.add(self._later(key), self._duration(rank, instruction))
        return key

    def _later(self, key: Key) -> Process:
        self.clock.happen(key)
        yield from ()

    def _send(self, message: _Message) -> None:
        places = range(1 if isinstance(message.instruction, PushBuffers) else len(self._queues))
        for place in places:
            self._arrive(place, message)

    def _arrive(self, place: int, message: _Message) -> None:
        queue = self._queues[place]
        queue.messages.append(message)
        queue.arrived += 1
        self.clock.happen(("message", place, queue.arrived))

    def _server(self, place: int) -> Process:
        queue, rank = self._queues[place], self.plan.mesh.size + place
        (serve,) = self.program.of(rank).instructions
        assert isinstance(serve, Serve)
        pulls = {i.bucket: i for i in self.program.of(0).instructions if isinstance(i, Pull)}
        wanted = len(self.program.of(0).buckets) + (1 if serve.buffers and place == 0 else 0)
        handled = 0
        while self._left < self.plan.mesh.size or queue.messages:
            handled += 1
            yield ("message", place, handled)
            message = queue.messages.popleft()
            start_s = self.clock.now_s
            match message.instruction:
                case None:
                    queue.rule.leave(message.worker)
                case Pull():
                    queue.asks.append(message)
                case push:
                    yield self._duration(rank, push)
                    self._span(rank, message.step, push, start_s)
                    parts = queue.parts[message.worker] = queue.parts.get(message.worker, 0) + 1
                    if parts % wanted == 0:
                        queue.rule.push(message.worker, message.step)
            while (due := queue.rule.due()) is not None:
                start_s = self.clock.now_s
                yield self._duration(rank, serve)
                self._span(rank, due.step, serve, start_s)
                queue.rule.done()
            for ask in [a for a in queue.asks if queue.rule.may_pull(a.worker, a.step)]:
                queue.asks.remove(ask)
                yield from self._answer(place, ask, [pulls[bucket] for bucket in serve.order])

    def _answer(self, place: int, ask: _Message, pulls: list[Pull]) -> Process:
        rank = self.plan.mesh.size + place
        self._queues[place].rule.pulled(ask.worker, ask.step)
        for pull in pulls:
            start_s = self.clock.now_s
            yield self._duration(rank, pull)
            self._span(rank, ask.step, pull, start_s)
            self.clock.happen((place, ask.worker, pull.bucket, ask.number))

    def _span(self, rank: int, step: int, instruction: Instruction, start_s: float) -> None:
        self.spans.append(
            Span(
                rank=rank,
                step=step,
                instruction=instruction.id,
                kind=instruction.kind,
                name=instruction.name,
                lane="compute" if rank >= self.plan.mesh.size else instruction.lane,
                start_s=start_s,
                end_s=self.clock.now_s,
                micro_batch=instruction.micro_batch,
                num_bytes=instruction.num_bytes,
            )
        )

    def trace(self) -> Trace:
        return Trace(
            spans=tuple(self.spans),
            ranks=tuple(range(self.plan.ranks)),
            source="simulated",
            metadata={"plan": self.plan.name, "mesh": dict(self.plan.mesh.axes)},
        )


def simulate_served(program: Program, duration: Duration, *, steps: int) -> Trace:
    """Run `steps` steps of all workers and their servers on clocks."""
    run = _Run(program, duration, steps, {})
    run.run()
    return run.trace()


def predicted_throughput(
    program: Program, duration: Duration, *, steps: int = 60, slow: Mapping[int, float] | None = None
) -> float:
    """Steps a second once a run has settled, with workers of which some compute `slow` times as long."""
    run = _Run(program, duration, steps, slow or {})
    run.run()
    shares = run.ended_s
    first, last = len(shares) // 4, len(shares) * 3 // 4
    return (last - first) / program.plan.mesh.size / (shares[last] - shares[first])


def _between_s(trace: Trace, program: Program, rank: int) -> float:
    """Time of a worker's share in which no instruction runs; a median, for a trace leaves out the middle of a run."""
    own = {i.id for i in program.of(rank).instructions if not isinstance(i, Collective | Pull)}
    first = min(own)
    counted = [s for s in trace.spans if s.instruction in own or s.kind in ("evaluate", "checkpoint")]
    spans = sorted((s for s in counted if s.rank == rank), key=lambda s: s.start_s)
    begins = [at for at, span in enumerate(spans) if span.instruction == first]
    gaps = [
        spans[end].start_s - spans[begin].start_s - sum(span.duration_s for span in spans[begin:end])
        for begin, end in pairwise(begins)
    ]
    return max(0.0, median(gaps)) if gaps else 0.0


def served_durations(trace: Trace, program: Program) -> Duration:
    """Mean durations of a measured trace, by rank and instruction; what a server does, by kind.

    Waiting is left to the simulator; what a worker does itself at the end of a wait is not known, and counts as none.
    What it does between instructions (loading, telling) counts as part of the last one.
    """
    plan = program.plan
    waits = {i.id for i in program.of(0).instructions if isinstance(i, Wait)}
    spent: dict[tuple[int, object], list[float]] = {}
    for span in trace.spans:
        is_server = span.rank >= plan.mesh.size
        if is_server or span.instruction not in waits:
            key = span.name if is_server else span.instruction
            spent.setdefault((span.rank, key), []).append(span.duration_s)
    means = {place: mean(times[len(times) // 10 :]) for place, times in spent.items()}
    last = program.of(0).instructions[-1].id
    for rank in range(plan.mesh.size):
        means[rank, last] = means.get((rank, last), 0.0) + _between_s(trace, program, rank)
    num_pulls = max(1, sum(isinstance(i, Pull) for i in program.of(0).instructions))

    def duration(rank: int, instruction: Instruction) -> float:
        if rank < plan.mesh.size:
            return means.get((rank, instruction.id), 0.0)
        match instruction:
            case Pull():
                return means.get((rank, "pull"), 0.0) / num_pulls
            case PushBuffers():
                return means.get((rank, "buffers"), 0.0)
            case Push():
                return means.get((rank, "push"), 0.0)
        return means.get((rank, "update"), 0.0)

    return duration
