"""The clocks of all ranks, and who may go on when.

In: what each rank does, as an iterator. Out: spans. Every rank has a clock of its own and runs ahead on it. Only where
the outcome depends on who comes first (a message to a server, the next share of a step) does it wait until all others
have got as far: nothing earlier can happen then. So what meets in a fixed order costs no more than stepping through it.
Where ranks are more than the processors that they share, everybody waits like that before it works, and how fast it
works depends on how many do at the same moment.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.program.instructions import Instruction
from plait.trace.span import Span

Duration = Callable[[int, Instruction], float]
"""(rank, instruction) -> seconds; for a collective, the time from the last arrival to its end; for a `Send`, the time
for which the message travels. A `Recv` and a `Wait` take what they take. On a server's rank: to handle a worker's
`Push`, `PushBuffers` or `Exchange`, to answer a `Pull`, and (`Serve`) to apply an update."""
Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a rank does on a processor that it shares."""

    rank: int
    seconds: float
    """That it takes while all ranks work."""


Turn = Iterator["Key | float | Work"]
"""What a rank does: it yields what it waits for, the moment at which everybody must have got as far, or its work."""


class Clock:
    """Time, by rank."""

    def __init__(self, ranks: int, duration: Duration, processors: int | None = None) -> None:
        """`processors` that all ranks share: durations are those of ranks which all work at once. None: each has its
        own, or there are enough."""
        self.now_s = [0.0] * ranks
        """How far each rank has got."""
        self.ends_s: dict[Key, float] = {}
        """When things happened that ranks may wait for."""
        self.spans: list[Span] = []
        self.duration = duration
        self._ready: deque[int] = deque()
        self._waiting: dict[Key, list[int]] = {}
        self._ranks, self._processors = ranks, processors
        self._is_shared = processors is not None and processors < ranks
        self._now_s = 0.0
        """How far everybody has got, where processors are shared."""
        self._worked_s = 0.0
        """How much of its work somebody would have done by now who had always been at it."""
        self._at_work: list[tuple[float, int]] = []
        """How much that will be when a rank has done its work, and which: the first to end is the first."""

    def happen(self, key: Key, at_s: float) -> None:
        """Something that ranks may wait for happens at a moment, which may be ahead of them."""
        self.ends_s[key] = at_s
        self._ready.extend(self._waiting.pop(key, ()))

    def run(self, turns: Mapping[int, Turn]) -> Sequence[int]:
        """Let ranks go on until none can; returns those that have not come to their end."""
        open_ = dict(turns)
        later: list[tuple[float, int, int]] = []
        number = 0
        self._ready.extend(open_)
        while self._ready or later or self._at_work:
            rank = self._ready.popleft() if self._ready else self._next(later)
            wanted = next(open_[rank], None)
            if wanted is None:
                del open_[rank]
            elif isinstance(wanted, Work):
                heapq.heappush(self._at_work, (self._worked_s + wanted.seconds, wanted.rank))
            elif isinstance(wanted, float):
                number += 1
                heapq.heappush(later, (wanted, number, rank))
            else:
                self._waiting.setdefault(wanted, []).append(rank)
        return sorted(open_)

    def _next(self, later: "list[tuple[float, int, int]]") -> int:
        """Who goes on when all have got as far as they can: who waits for a moment, or has done its work."""
        speed = self._ranks / max(self._processors or self._ranks, len(self._at_work))
        end_s = self._now_s + (self._at_work[0][0] - self._worked_s) / speed if self._at_work else math.inf
        if later and later[0][0] < end_s:
            at_s, _, rank = heapq.heappop(later)
            self._worked_s += max(0.0, at_s - self._now_s) * speed
            self._now_s = max(self._now_s, at_s)
            return rank
        self._worked_s, rank = heapq.heappop(self._at_work)
        self._now_s = self.now_s[rank] = end_s
        return rank

    def busy(self, rank: int, seconds: float) -> Turn:
        """A rank needs a processor for so long."""
        if not self._is_shared:
            self.now_s[rank] += seconds
        elif seconds > 0:
            if self.now_s[rank] > self._now_s:
                yield self.now_s[rank]
            yield Work(rank=rank, seconds=seconds)

    def local(self, rank: int, step: int, instruction: Instruction) -> Turn:
        """A rank is busy with an instruction."""
        start_s = self.now_s[rank]
        yield from self.busy(rank, self.duration(rank, instruction))
        self.span(rank, step, instruction, start_s, self.now_s[rank])

    def span(self, rank: int, step: int, instruction: Instruction, start_s: float, end_s: float) -> None:
        """Write down when a rank did what."""
        self.spans.append(
            Span(
                rank=rank,
                step=step,
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
