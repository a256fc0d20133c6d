"""The simulator: interprets a program by advancing clocks.

In: a program and how long each instruction takes. Out: a `Trace` of the same kind as a measured one. A rank's
lanes are queues: an instruction starts when its lane is free and what it waits for is done; a collective
starts when every rank of its group has issued it and lasts equally long for all; a message leaves when it is sent and
the one before it, to the same rank, has arrived.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait.errors import ProgramError
from plait.program.averaging import has_center
from plait.program.check.walk import Key, Walk
from plait.program.instructions import Collective, Instruction, Recv, Send, Wait
from plait.program.program import Program
from plait.program.simulate.fold import representatives
from plait.program.simulate.rounds import simulate_center
from plait.program.simulate.served import served_durations, simulate_served
from plait.trace.span import Span, Trace

Duration = Callable[[int, Instruction], float]
"""(rank, instruction) -> seconds; for a collective, the time from the last arrival to its end; for a `Send`, the time
for which the message travels. A `Recv` and a `Wait` take what they take."""


@dataclass(slots=True)
class _Clocks:
    """Where every queue stands."""

    compute_s: list[float]
    """By rank."""
    communication_s: list[float]
    """By rank: collectives run one after the other."""
    links_s: dict[Key, float] = field(default_factory=dict)
    """By (sender, receiver)."""


class _Step:
    """One step: what has been issued and what is done."""

    def __init__(
        self, number: int, clocks: _Clocks, duration: Duration, own_part: Duration, spans: list[Span]
    ) -> None:
        self.number, self.clocks, self.spans = number, clocks, spans
        self.duration, self.own_part = duration, own_part
        self.arrived: dict[Key, list[tuple[int, Collective, float]]] = {}
        self.posted: dict[Key, tuple[int, Recv, float]] = {}
        self.ends_s: dict[Key, float] = {}

    def execute(self, rank: int, instruction: Instruction, key: Key | None) -> None:
        """Advance the clocks by one instruction; whatever it waits for has been executed."""
        now_s = self.clocks.compute_s[rank]
        if key is None:
            end_s = now_s + self.duration(rank, instruction)
        elif isinstance(instruction, Collective):
            return self._meet(key, rank, instruction, now_s)
        elif isinstance(instruction, Send):
            return self._send(key, rank, instruction, now_s)
        elif isinstance(instruction, Recv):
            if key in self.ends_s:
                self._span(rank, instruction, now_s, max(now_s, self.ends_s[key]))
            else:
                self.posted[key] = (rank, instruction, now_s)
            return None
        else:
            end_s = max(now_s, self.ends_s[key]) + self.own_part(rank, instruction)
        self._span(rank, instruction, now_s, end_s)
        self.clocks.compute_s[rank] = end_s
        return None

    def _meet(self, key: Key, rank: int, instruction: Collective, now_s: float) -> None:
        """Arrive at a collective; it runs on the communication lanes of the group once everybody is there."""
        arrived = self.arrived.setdefault(key, [])
        arrived.append((rank, instruction, now_s))
        group = key[0]
        assert isinstance(group, tuple)
        if len(arrived) == len(group):
            lanes = self.clocks.communication_s
            start_s = max(max(at_s, lanes[member]) for member, _, at_s in arrived)
            end_s = self.ends_s[key] = start_s + self.duration(group[0], instruction)
            for member, own, at_s in arrived:
                lanes[member] = end_s
                self._span(member, own, at_s, end_s)

    def _send(self, key: Key, rank: int, instruction: Send, now_s: float) -> None:
        """Put a message on its way; on the compute lane, handing it over takes no time."""
        link = key[:2]
        start_s = max(now_s, self.clocks.links_s.get(link, 0.0))
        end_s = self.clocks.links_s[link] = self.ends_s[key] = start_s + self.duration(rank, instruction)
        self._span(rank, instruction, now_s, end_s if instruction.lane == "communication" else now_s)
        if key in self.posted:
            receiver, recv, posted_s = self.posted.pop(key)
            self._span(receiver, recv, posted_s, max(posted_s, end_s))

    def _span(self, rank: int, instruction: Instruction, start_s: float, end_s: float) -> None:
        self.spans.append(
            Span(
                rank=rank,
                step=self.number,
                instruction=instruction.id,
                kind=instruction.kind,
                name=instruction.name,
                lane=instruction.lane,
                start_s=start_s,
                end_s=end_s,
                micro_batch=instruction.micro_batch,
                stage=instruction.stage,
                num_bytes=instruction.num_bytes,
            )
        )


def simulate(
    program: Program | Sequence[Program],
    duration: Duration,
    *,
    steps: int = 1,
    folded: bool = False,
    own_part: Duration = lambda rank, wait: 0.0,
) -> Trace:
    """Run `steps` steps of all ranks on clocks, in a time that grows as the number of instructions does.

    Several programs are those of consecutive steps, again and again: of workers that average now and then, a round.
    `own_part` is what a rank computes itself at the end of a `Wait`, on links that do not work in the background.
    `folded`: only one rank of each class is stepped through, and the trace shows these alone. It says the same where
    durations do not differ within a class.
    """
    in_turn = [program] if isinstance(program, Program) else program
    plan = in_turn[0].plan
    mesh = plan.mesh
    if plan.sync.has_servers:
        return simulate_served(in_turn[0], duration, steps=steps)
    if has_center(plan):
        return simulate_center(in_turn, duration, steps=steps)
    fold = representatives(in_turn[0]) if folded else None
    clocks = _Clocks(compute_s=[0.0] * mesh.size, communication_s=[0.0] * mesh.size)
    spans: list[Span] = []
    for number in range(steps):
        step = _Step(number, clocks, duration, own_part, spans)
        walk = Walk(in_turn[number % len(in_turn)], fold)
        for rank, instruction, key in walk:
            step.execute(rank, instruction, key)
        if walk.blocked:
            told = ", ".join(
                f"rank {rank} in {wait.name}" for rank, (wait, _) in sorted(walk.blocked.items())
            )
            raise ProgramError(f"the program deadlocks: {told}.")
    return Trace(
        spans=tuple(spans),
        ranks=tuple(range(mesh.size)) if fold is None else tuple(sorted(set(fold))),
        source="simulated",
        metadata={"plan": plan.name, "mesh": dict(mesh.axes)},
    )


def measured_durations(trace: Trace, program: Program) -> Duration:
    """Mean durations of a measured trace of a program, by rank and instruction.

    Waiting is left to the simulator: a collective counts from its last arrival, or the end of the one before,
    to where the first rank had its result. A message takes as long as the quickest of its size between its two ranks,
    from where it was sent to where it was received: of the others nobody knows how long they lay there.
    """
    if program.plan.sync.has_servers:
        return served_durations(trace, program)
    keys = {
        (rank, i.id): key for rank, i, key in Walk(program) if key is not None and not isinstance(i, Wait)
    }
    spent: dict[tuple[int, int], list[float]] = {}
    met: dict[tuple[int, Key], list[Span]] = {}
    for span in trace.spans:
        key = keys.get((span.rank, span.instruction))
        if key is not None:
            met.setdefault((span.step, key), []).append(span)
        else:
            spent.setdefault((span.rank, span.instruction), []).append(span.end_s - span.start_s)
    before_s: dict[int, float] = {}
    quickest: dict[Key, float] = {}
    links: dict[tuple[int, int], Key] = {}
    for (_, key), spans in sorted(met.items(), key=lambda item: max(span.start_s for span in item[1])):
        if isinstance(key[0], tuple):
            start_s = max(max(span.start_s, before_s.get(span.rank, 0.0)) for span in spans)
            end_s = min(span.end_s for span in spans)
            for span in spans:
                spent.setdefault((span.rank, span.instruction), []).append(max(0.0, end_s - start_s))
                before_s[span.rank] = max(before_s.get(span.rank, 0.0), end_s)
        else:
            link: Key = (*key[:2], spans[0].num_bytes)
            lasted = max(span.end_s for span in spans) - min(
                span.start_s for span in spans if span.rank == key[0]
            )
            quickest[link] = min(lasted, quickest.get(link, lasted))
            links |= {(span.rank, span.instruction): link for span in spans}
    means = {place: sum(times) / len(times) for place, times in spent.items()}
    means |= {place: quickest[link] for place, link in links.items()}
    return lambda rank, instruction: means.get((rank, instruction.id), 0.0)
