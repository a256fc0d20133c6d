"""What one rank did, and when: the values that the workers and the simulator both make.

In: times of executed instructions. Out: `Span`, `Totals` and `Trace`, checked when they are built.
Nothing here reads a clock or a file.

A lane is a queue of one rank. Lane `compute` is the rank's main line: whatever it does itself is there, one
thing after another, so that a step is the sum of its spans and of the gaps between them. Work on the other
lanes goes on beside it:

    compute        forward  forward  backward   backward  wait   update
    communication                       all-reduce──────────┘
    data           next batch ───────

A `communication` span lasts from issue to completion. A `wait` span is the time for which the compute lane
stood still until a communication was done: communication that nothing hides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

SpanKind = Literal[
    "data", "forward", "backward", "communication", "wait", "update", "host", "evaluate", "checkpoint"
]
Lane = Literal["compute", "communication", "data", "host"]
Source = Literal["measured", "simulated"]

KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
LANES: tuple[Lane, ...] = get_args(Lane)
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One executed instruction."""

    rank: int
    """The process that executed it."""
    step: int
    """The optimizer step to which it belongs."""
    instruction: int
    """Its id within the rank's program."""
    kind: SpanKind
    """What sort of work it was."""
    name: str
    """What a person calls it: `all-reduce bucket 3`."""
    lane: Lane
    """The queue on which it ran."""
    start_s: float
    """Seconds since the origin of the trace."""
    end_s: float
    """Seconds since the origin of the trace; never before `start_s`."""
    micro_batch: int | None = None
    """The slice of the batch, where it belongs to one."""
    stage: int | None = None
    """The stage of the pipeline, where it belongs to one."""
    num_bytes: int = 0
    """Bytes that it moved; 0 for computation."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"span {self.name!r} has kind {self.kind!r}; the kinds are {', '.join(KINDS)}")
        if self.lane not in LANES:
            raise ValueError(f"span {self.name!r} has lane {self.lane!r}; the lanes are {', '.join(LANES)}")
        if not self.start_s <= self.end_s:
            raise ValueError(
                f"span {self.name!r} ends at {self.end_s} s, before it starts at {self.start_s} s"
            )
        if self.num_bytes < 0:
            raise ValueError(f"span {self.name!r} moved {self.num_bytes} bytes; that cannot be negative")

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """One rank's sums over a run whose spans were too many to keep, its first step (the warm-up) left out."""

    rank: int
    """The process that they sum up."""
    num_steps: int
    """Steps after the first."""
    wall_s: float
    """From the end of the first step to the end of the last."""
    compute_s: Mapping[str, float]
    """Time of the compute lane by kind of span; no moment counts twice."""
    communication_s: float
    """Time during which at least one communication was under way beside the compute lane."""
    background_s: float
    """Time of the lanes `data` and `host`, which run beside the compute lane."""
    num_bytes: int
    """Bytes communicated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What happened on every rank, or would happen."""

    spans: tuple[Span, ...]
    """Every span that was kept, in any order."""
    ranks: tuple[int, ...]
    """The ranks that it covers, ascending; a rank may have no span."""
    source: Source = "measured"
    """Whether workers measured it or the simulator predicted it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Facts for readers, such as `origin_ns`: the moment of 0 s, in nanoseconds since the epoch."""
    totals: tuple[Totals, ...] = ()
    """Sums over the whole run, for ranks that did not keep every span."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"a trace is {' or '.join(SOURCES)}, not {self.source!r}")
        if list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"ranks {self.ranks} are not ascending, each once")
        strangers = {span.rank for span in self.spans}.difference(self.ranks)
        if strangers:
            raise ValueError(
                f"spans belong to ranks {sorted(strangers)}; the trace covers {list(self.ranks)}"
            )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which spans were kept, ascending."""
        return tuple(sorted({span.step for span in self.spans}))


class Sweep:
    """Adds up intervals that come in order of their start, so that no moment counts twice.

    Where two overlap, the time belongs to the one that started first. The sum over all is the length of their
    union.
    """

    __slots__ = ("reached",)

    def __init__(self, reached: float) -> None:
        self.reached = reached

    def add(self, start: float, end: float) -> float:
        """The part of this interval that nothing before it covered."""
        begin = start if start > self.reached else self.reached
        if end <= begin:
            return 0
        self.reached = end
        return end - begin


def union_s(intervals: Iterable[tuple[float, float]], *, after_s: float, before_s: float) -> float:
    """The time that at least one of the intervals covers between two moments."""
    sweep = Sweep(after_s)
    return sum(sweep.add(start, min(end, before_s)) for start, end in sorted(intervals))
