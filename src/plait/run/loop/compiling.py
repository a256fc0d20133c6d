"""When ranks begin to use what is compiled behind their steps: all of them with the same step.

In: the end of every step. Out: compiled segments in use, and it is told. What several ranks compute alike must be
rounded alike, so about once a second they tell each other what is ready, and use what is ready everywhere. Where each
worker has weights of its own nobody has to agree. It never waits for a compiler, only for the other ranks.
"""

from typing import Any

from plait.plan.plan import Plan
from plait.program.segment.compiled import CompiledSegments
from plait.run.interpret.segments import Segments
from plait.run.start.launch import Seat
from plait.run.wire.tell import tell
from plait.units import format_seconds

_PAUSE_S = 1.0
"""Between two looks: each costs a message to all ranks, well under a millisecond on one host."""
_MOST_STEPS = 1000
"""Between two looks."""


class Compiling:
    """One rank's part in it."""

    def __init__(self, segments: Segments, plan: Plan, seat: Seat, start_step: int) -> None:
        self._segments, self._seat = segments, seat
        self._meets = seat.ranks > 1 and plan.agreement.sums
        self._next = start_step
        self._is_over = False
        self._told_room = False
        compiled = segments.compiled
        if compiled is not None:
            compiled.step = start_step

    def after(self, step: int, step_s: float) -> None:
        """Look, if it is time to; `step_s` is how long the step took. All ranks that meet must call it."""
        compiled = self._segments.compiled
        if compiled is None or compiled.behind is None or self._is_over:
            return
        compiled.step = step + 1
        if step < self._next:
            return
        compiled.hear()
        behind = compiled.behind
        self._tell_room(behind.no_room)
        told: list[list[Any]] = [[min(behind.settled_until, step), behind.lost, step_s]]
        if self._meets:
            self._seat.board.enter(step, -1, "agree on compiled segments", True)
            told = tell(told[0])
        self._next = step + max(1, min(_MOST_STEPS, int(_PAUSE_S / max(told[0][2], 1e-6))))
        lost = [(rank, entry[1]) for rank, entry in enumerate(told) if entry[1] is not None]
        if lost:
            self._give_up(*lost[0])
        else:
            self._use(compiled, min(entry[0] for entry in told), step)

    def _use(self, compiled: CompiledSegments, until: int, step: int) -> None:
        self._seat.board.enter(step, -1, "load compiled segments")
        taken = compiled.take(until)
        if not taken:
            return
        if compiled.first_step is None:
            compiled.first_step = step + 1
        if self._segments.captured is not None:
            self._segments.captured.restart()
        counted = compiled.counted()
        self._notice(
            f"from step {step + 2} on {counted['segments']} segments are compiled, which took "
            f"{format_seconds(counted['seconds'])} beside the steps."
        )

    def _give_up(self, rank: int, why: str) -> None:
        """Steps go on as they are; the process of one rank is enough, for all must do alike."""
        assert self._segments.compiled is not None and self._segments.compiled.behind is not None
        self._is_over = True
        behind = self._segments.compiled.behind
        behind.lost = behind.lost or why
        behind.close()
        self._notice(f"what is not compiled yet runs as written from here on: on rank {rank} {why}.")

    def _tell_room(self, why: str | None) -> None:
        if why is not None and not self._told_room:
            self._told_room = True
            self._notice(f"steps wait for their compilation: {why}.")

    def _notice(self, text: str) -> None:
        if self._seat.rank == 0:
            self._seat.emit({"notice": text})
