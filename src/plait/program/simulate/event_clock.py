"""The clocks of all ranks, and who may go on when.

In: what each rank does, as an iterator. Out: spans. Every rank has a clock of its own and runs ahead on it. Only where
the outcome depends on who comes first (a message to a server, the next share of a step) does it wait until all others
have got as far: nothing earlier can happen then. So what meets in a fixed order costs no more than stepping through it.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from plait.program.instructions import Instruction
from plait.trace.span import Span

Duration = Callable[[int, Instruction], float]
"""(rank, instruction) -> seconds; for a collective, the time from the last arrival to its end; for a `Send`, the time
for which the message travels. A `Recv` and a `Wait` take what they take. On a server's rank: to handle a worker's
`Push`, `PushBuffers` or `Exchange`, to answer a `Pull`, and (`Serve`) to apply an update."""
Key = tuple[object, ...]
Turn = Iterator["Key | float"]
"""What a rank does: it yields what it waits for, or the moment at which everybody must have got as far."""


class Clock:
    """Time, by rank."""

    def __init__(self, ranks: int, duration: Duration) -> None:
        self.now_s = [0.0] * ranks
        """How far each rank has got."""
        self.ends_s: dict[Key, float] = {}
        """When things happened that ranks may wait for."""
        self.spans: list[Span] = []
        self.duration = duration
        self._ready: deque[int] = deque()
        self._waiting: dict[Key, list[int]] = {}

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
        while self._ready or later:
            rank = self._ready.popleft() if self._ready else heapq.heappop(later)[2]
            wanted = next(open_[rank], None)
            if wanted is None:
                del open_[rank]
            elif isinstance(wanted, float):
                number += 1
                heapq.heappush(later, (wanted, number, rank))
            else:
                self._waiting.setdefault(wanted, []).append(rank)
        return sorted(open_)

    def local(self, rank: int, step: int, instruction: Instruction) -> None:
        """A rank is busy with an instruction."""
        start_s = self.now_s[rank]
        end_s = self.now_s[rank] = start_s + self.duration(rank, instruction)
        self.span(rank, step, instruction, start_s, end_s)

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
