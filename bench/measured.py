"""What a measured run says about durations, and what a simulated one about speed.

In: a trace of real ranks and the programs that they ran. Out: durations for `simulate`, on which a straggler or another
number of steps can be tried; steps a second of a trace.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from plait.program.check.walk import Peers
from plait.program.instructions import (
    Collective,
    Compute,
    Exchange,
    Instruction,
    Opaque,
    Pull,
    Push,
    PushBuffers,
    Recv,
    Send,
    Wait,
)
from plait.program.program import Program
from plait.program.simulate.event_clock import Duration, Key
from plait.program.simulate.served import handler_of
from plait.trace.span import Span, Trace

_Where = tuple[int, str, int | None, int | None]
"""(rank, name, micro-batch, stage): the same for all steps, and all programs of a round."""
Known = dict[_Where, Instruction]
"""The instructions of workers; of a `Wait`, what it waits for."""


def _key(rank: int, what: Instruction | Span) -> _Where:
    return rank, what.name, what.micro_batch, what.stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What `simulate` takes."""

    duration: Duration
    own_part: Duration
    """Of what a worker asks servers for: from where it was answered, or waited for, to where the worker has it."""


def measured_durations(trace: Trace, program: Program | Sequence[Program]) -> Measured:
    """Mean durations of a measured trace of a program, or of the programs of a round, by rank and instruction.

    Waiting is left to the simulator: a collective counts from its last arrival, or the end of the one before, to where
    the first rank had its result. A message takes as long as the quickest of its size between its two ranks, from where
    it was sent to where it was received: of the others nobody knows how long they lay there. What a server does counts
    by handler, from where a message was sent or the server had done what came before it. What a worker does between
    instructions (loading, telling) counts as part of a step's first one.
    """
    programs = [program] if isinstance(program, Program) else program
    workers = programs[0].plan.mesh.size
    met_by, travels, known = _transfers(programs)
    spent: dict[_Where, list[float]] = {}
    met: dict[tuple[int, Key], list[Span]] = {}
    sent: dict[tuple[int, Key], list[Span]] = {}
    for span in trace.spans:
        key = _key(span.rank, span)
        if key in met_by:
            met.setdefault((span.step, met_by[key]), []).append(span)
        elif key in travels:
            sent.setdefault((span.step, travels[key]), []).append(span)
        elif key in known and span.kind != "wait":
            spent.setdefault(key, []).append(span.duration_s)
    served = _Served(trace, known, workers)
    for key, seconds in (*_collectives(met), *served.handled()):
        spent.setdefault(key, []).append(seconds)
    means = {key: mean(times) for key, times in spent.items()} | _messages(sent)
    fetched = {key: mean(times) for key, times in served.fetched().items()}
    between_s = [_between_s(trace, known, rank) for rank in range(workers)]
    pulls = max(1, sum(isinstance(i, Pull) for i in programs[0].of(0).instructions))

    def duration(rank: int, instruction: Instruction) -> float:
        if rank >= workers:
            seconds = means.get((rank, handler_of(instruction), None, None), 0.0)
            return seconds / pulls if isinstance(instruction, Pull) else seconds
        lasts_s = 0.0 if isinstance(instruction, Wait | Pull) else means.get(_key(rank, instruction), 0.0)
        return lasts_s + (between_s[rank] if instruction.id == 0 else 0.0)

    return Measured(duration=duration, own_part=lambda rank, started: fetched.get(_key(rank, started), 0.0))


def _transfers(
    programs: Sequence[Program],
) -> tuple[dict[_Where, Key], dict[_Where, Key], Known]:
    """What identifies a meeting and a message on all of its ranks, by key; and all instructions of workers."""
    met: dict[_Where, Key] = {}
    sent: dict[_Where, Key] = {}
    known: Known = {}
    for program in programs:
        peers = Peers(program.plan.mesh)
        for rank in range(program.plan.mesh.size):
            counts: dict[Key, int] = {}
            own = {instruction.id: instruction for instruction in program.of(rank).instructions}
            for instruction in own.values():
                key = _key(rank, instruction)
                known[key] = own[instruction.of] if isinstance(instruction, Wait) else instruction
                if isinstance(instruction, Collective):
                    group = peers.group(rank, instruction.axis)
                    counts[group,] = counts.get((group,), -1) + 1
                    met[key] = (group, counts[group,])
                elif isinstance(instruction, Send | Recv):
                    sent[key] = peers.message(rank, instruction)
    return met, sent, known


def _collectives(met: Mapping[tuple[int, Key], list[Span]]) -> list[tuple[_Where, float]]:
    """How long collectives took, on each of their ranks, where all had come and the lane was free."""
    found: list[tuple[_Where, float]] = []
    before_s: dict[int, float] = {}
    for spans in sorted(met.values(), key=lambda spans: max(span.start_s for span in spans)):
        start_s = max(max(span.start_s, before_s.get(span.rank, 0.0)) for span in spans)
        end_s = min(span.end_s for span in spans)
        for span in spans:
            found.append((_key(span.rank, span), max(0.0, end_s - start_s)))
            before_s[span.rank] = max(before_s.get(span.rank, 0.0), end_s)
    return found


def _messages(sent: Mapping[tuple[int, Key], list[Span]]) -> dict[_Where, float]:
    """The quickest of all messages of a size between two ranks."""
    quickest: dict[Key, float] = {}
    links: dict[_Where, Key] = {}
    for (_, key), spans in sent.items():
        link: Key = (*key[:2], spans[0].num_bytes)
        lasted = max(span.end_s for span in spans) - min(s.start_s for s in spans if s.rank == key[0])
        quickest[link] = min(lasted, quickest.get(link, lasted))
        links |= {_key(span.rank, span): link for span in spans}
    return {key: quickest[link] for key, link in links.items()}


def _is_own(span: Span, known: Known) -> bool:
    """Whether the worker itself is busy, or waits, for so long."""
    what = known.get(_key(span.rank, span))
    return what is not None and (span.lane == "compute" or isinstance(what, Push | PushBuffers | Exchange))


class _Served:
    """What workers and servers say to each other, by a trace."""

    def __init__(self, trace: Trace, known: Known, workers: int) -> None:
        self._known = known
        self._asked: dict[tuple[str, int], list[float]] = {}
        """When messages were sent, by handler and step."""
        self._got: dict[tuple[str, int], list[Span]] = {}
        """Where workers waited for an answer, by the handler that gives it and step."""
        self._lines: dict[int, list[Span]] = {}
        """What each server did."""
        steps = {span.step for span in trace.spans}
        first = min((what.id for what in known.values() if isinstance(what, Pull)), default=0)
        for span in sorted(trace.spans, key=lambda span: (span.start_s, span.end_s)):
            what = known.get(_key(span.rank, span))
            if span.rank >= workers:
                self._lines.setdefault(span.rank, []).append(span)
            elif span.step - 1 not in steps:
                continue  # what came before it is left out
            elif span.kind == "wait" and isinstance(what, Pull | Exchange):
                handler = "pull" if isinstance(what, Pull) else "update"
                self._got.setdefault((handler, span.step), []).append(span)
            elif isinstance(what, Push | PushBuffers | Exchange):
                self._asked.setdefault((handler_of(what), span.step), []).append(span.end_s)
            elif isinstance(what, Pull) and what.id == first:  # for all buckets at once
                self._asked.setdefault(("pull", span.step), []).append(span.start_s)

    def handled(self) -> Iterator[tuple[_Where, float]]:
        """How long servers took: from a message, or from where they had done what came before."""
        for line in self._lines.values():
            turns: dict[tuple[str, int], int] = {}
            for before, span in pairwise(line):
                key = (span.name, span.step)
                turn = turns[key] = turns.get(key, -1) + 1
                asked = sorted(self._asked.get(key, ()))
                sent_s = asked[turn] if turn < len(asked) else span.start_s
                if span.name == "update":
                    sent_s = before.end_s if before.step == span.step else span.start_s
                yield _key(span.rank, span), span.end_s - min(span.start_s, max(before.end_s, sent_s))

    def fetched(self) -> dict[_Where, list[float]]:
        """How long it took from answers to where workers had them."""
        found: dict[_Where, list[float]] = {}
        for (handler, step), spans in self._got.items():
            answers = [
                [span.end_s for span in line if (span.name, span.step) == (handler, step)]
                for line in self._lines.values()
            ]
            by_name: dict[str, list[Span]] = {}
            for span in spans:
                by_name.setdefault(span.name, []).append(span)
            for own in by_name.values():
                if any(len(line) != len(own) for line in answers):
                    continue
                ends_s = [max(ends) for ends in zip(*map(sorted, answers), strict=True)]
                for span, end_s in zip(sorted(own, key=lambda s: s.end_s), ends_s, strict=True):
                    key = _key(span.rank, self._known[_key(span.rank, span)])
                    found.setdefault(key, []).append(max(0.0, span.end_s - max(span.start_s, end_s)))
        return found


def _between_s(trace: Trace, known: Known, rank: int) -> float:
    """Time of a worker's step in which no instruction runs; a median, for a trace leaves out the middle of a run."""
    beside = ("evaluate", "checkpoint")
    line = sorted(
        (span for span in trace.spans if span.rank == rank and (_is_own(span, known) or span.kind in beside)),
        key=lambda span: (span.start_s, span.end_s),
    )
    begins = [0, *(at for at, (a, b) in enumerate(pairwise(line), start=1) if a.step != b.step)]
    gaps = []
    for begin, end in pairwise(begins):
        own = line[begin:end]
        if not any(span.kind in beside for span in own):
            lasted_s = line[end].start_s - own[0].start_s
            gaps.append(lasted_s - sum(span.duration_s for span in own))
    return max(0.0, median(gaps)) if gaps else 0.0


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
