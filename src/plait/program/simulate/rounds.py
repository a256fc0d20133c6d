"""The simulator of workers that mix in the weights of others now and then, all at once or with a center.

In: the programs of a round's steps, and how long each instruction takes. Out: a `Trace`, or steps a second. The center
is a queue: it takes one exchange after the other, as they come or in turn. Workers that meet it as they come take
tickets from one counter, the others their own share of every step. An `Exchange` lasts as long as sending does on a
worker's rank, and as long as the center is busy with it on the center's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from plait.program.instructions import Collective, Compute, Exchange, Instruction, Opaque, Wait
from plait.program.program import Program
from plait.program.serve.turns import Turns
from plait.program.simulate.event_clock import Clock, Key, Process
from plait.trace.span import Span, Trace

Duration = Callable[[int, Instruction], float]
_Message = tuple[int, Exchange | None, int]
"""(worker, exchange, its number); None: the worker leaves."""


class _Run:
    """Workers around a center."""

    def __init__(self, programs: Sequence[Program], duration: Duration, steps: int) -> None:
        self.plan = programs[0].plan
        self.clock = Clock()
        self.spans: list[Span] = []
        self._programs, self._duration = programs, duration
        self._shares = iter(range(steps * self.plan.mesh.size))
        self._steps = steps
        self._turns = Turns(self.plan.mesh.size, in_turn=self.plan.elastic.variant == "round-robin")
        self._waiting: list[deque[_Message]] = [deque() for _ in range(self.plan.mesh.size)]
        self._arrived = 0

    def run(self) -> Trace:
        for rank in range(self.plan.mesh.size):
            self.clock.add(self._worker(rank))
        self.clock.add(self._center())
        self.clock.run()
        return Trace(
            spans=tuple(self.spans),
            ranks=tuple(range(self.plan.ranks)),
            source="simulated",
            metadata={"plan": self.plan.name, "mesh": dict(self.plan.mesh.axes)},
        )

    def _places(self) -> Iterator[int]:
        if self.plan.elastic.variant == "round-robin":
            yield from range(self._steps)
            return
        for ticket in self._shares:
            yield ticket // self.plan.mesh.size

    def _worker(self, rank: int) -> Process:
        asked = 0
        for count, step in enumerate(self._places()):
            under_way: dict[int, Key] = {}
            for instruction in self._programs[count % len(self._programs)].of(rank).instructions:
                start_s = self.clock.now_s
                if isinstance(instruction, Wait):
                    yield under_way.pop(instruction.of)
                yield self._duration(rank, instruction)
                if isinstance(instruction, Exchange):
                    asked += 1
                    under_way[instruction.id] = (rank, asked)
                    self._arrive((rank, instruction, asked))
                self._span(rank, step, instruction, start_s)
        self._arrive((rank, None, 0))

    def _arrive(self, message: _Message) -> None:
        self._waiting[message[0]].append(message)
        self._arrived += 1
        self.clock.happen(("message", self._arrived))

    def _center(self) -> Process:
        rank, handled = self.plan.mesh.size, 0
        last = len(self._programs[0].of(rank).averages) - 1
        while not self._turns.all_gone:
            handled += 1
            yield ("message", handled)
            while (found := self._next()) is not None:
                worker, exchange, number = found
                if exchange is None:
                    self._turns.leave(worker)
                    continue
                start_s = self.clock.now_s
                yield self._duration(rank, exchange)
                self._span(rank, number, exchange, start_s)
                self.clock.happen((worker, number))
                if exchange.flat == last:
                    self._turns.done(worker)

    def _next(self) -> _Message | None:
        """A message that may be taken now."""
        for worker, waiting in enumerate(self._waiting):
            if waiting and (waiting[0][1] is None or self._turns.may(worker)):
                return waiting.popleft()
        return None

    def _span(self, rank: int, step: int, instruction: Instruction, start_s: float) -> None:
        self.spans.append(
            Span(
                rank=rank,
                step=step,
                instruction=instruction.id,
                kind=instruction.kind,
                name=instruction.name,
                lane="compute" if rank == self.plan.mesh.size else instruction.lane,
                start_s=start_s,
                end_s=self.clock.now_s,
                micro_batch=instruction.micro_batch,
                num_bytes=instruction.num_bytes,
            )
        )


def simulate_center(programs: Sequence[Program], duration: Duration, *, steps: int) -> Trace:
    """Run `steps` steps of workers around a center on clocks; each takes its programs in turn."""
    return _Run(programs, duration, steps).run()


def slowed(duration: Duration, slow: Mapping[int, float]) -> Duration:
    """Durations of a run in which some workers compute so many times as long."""

    def longer(rank: int, instruction: Instruction) -> float:
        factor = slow.get(rank, 1.0) if isinstance(instruction, Compute | Opaque) else 1.0
        return factor * duration(rank, instruction)

    return longer


def steps_per_s(trace: Trace, workers: int) -> float:
    """Steps a second once a run has settled: the middle half of all shares, by when workers begin them."""
    begun = sorted(s.start_s for s in trace.spans if s.rank < workers and s.instruction == 0)
    first, last = len(begun) // 4, len(begun) * 3 // 4
    return (last - first) / workers / (begun[last] - begun[first])


def round_durations(trace: Trace, programs: Sequence[Program]) -> Duration:
    """Medians of a measured trace by rank and name, for all programs of a round.

    Waiting is left to the simulator: a collective counts from its last arrival to where the first rank had its result.
    What a worker does between instructions (loading, telling) counts as part of the first one of a share.
    """
    plan = programs[0].plan
    workers = plan.mesh.size
    known = {i.name for program in programs for i in program.of(0).instructions}
    meet = {i.name for p in programs for i in p.of(0).instructions if isinstance(i, Collective)}
    spent: dict[tuple[int, str], list[float]] = {}
    met: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        if span.name in meet and span.rank < workers:
            met.setdefault((span.step, span.name), []).append(span)
        elif span.kind != "wait" and (span.rank >= workers or span.name in known):
            spent.setdefault((span.rank, span.name), []).append(span.duration_s)
    for (_, name), spans in met.items():
        lasted_s = min(s.end_s for s in spans) - max(s.start_s for s in spans)
        for rank in range(workers):
            spent.setdefault((rank, name), []).append(max(0.0, lasted_s))
    means = {place: median(times) for place, times in spent.items()}
    between_s = [_between_s(trace, known, rank) for rank in range(workers)]

    def duration(rank: int, instruction: Instruction) -> float:
        if rank >= workers:
            return means.get((rank, "exchange"), 0.0)
        lasts_s = 0.0 if isinstance(instruction, Wait) else means.get((rank, instruction.name), 0.0)
        return lasts_s + (between_s[rank] if instruction.id == 0 else 0.0)

    return duration


def _between_s(trace: Trace, known: set[str], rank: int) -> float:
    """Time from the end of a worker's step to where its next one begins."""
    spans = [s for s in trace.spans if s.rank == rank and s.name in known]
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in spans:
        starts[span.step] = min(starts.get(span.step, span.start_s), span.start_s)
        ends[span.step] = max(ends.get(span.step, span.end_s), span.end_s)
    order = sorted(starts, key=lambda step: starts[step])
    gaps = [starts[after] - ends[before] for before, after in pairwise(order)]
    return max(0.0, median(gaps)) if gaps else 0.0
