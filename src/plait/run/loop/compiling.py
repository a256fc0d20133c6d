"""When ranks begin to use what is compiled behind their steps: all of them with the same step.

In: the end of every step. Out: compiled segments in use, and it is told. What several ranks compute alike must be
rounded alike: norms and buffers of replicas, what `compare_every` and checkpoints compare. So about once a second they
tell each other what is ready, and use what is ready everywhere. Where each worker has weights of its own nobody has to
agree. It never waits for a compiler, only for the other ranks.
"""

import time
from typing import Any

from plait.plan.plan import Plan
from plait.program.segment.compiled import CompiledSegments
from plait.run.interpret.segments import Segments
from plait.run.start.launch import Seat
from plait.run.wire.tell import tell
from plait.units import format_seconds

COMPILED_SINCE = "compiled_since"
"""What checkpoints call the first step that ran compiled: who goes on from there is compiled from the start, so that it
computes what the run would have that was interrupted."""
_PAUSE_S = 1.0
"""Between two looks: each costs a message to all ranks, well under a millisecond on one host."""
_CALM_S = 30.0
"""The same where nobody waits for anything: shapes that are new come up seldom."""
_MOST_STEPS = 1000
"""Between two looks."""
_HEAR_S = 0.1
"""Between two looks at what the process of this rank says."""


class Compiling:
    """One rank's part in it."""

    def __init__(self, segments: Segments, plan: Plan, seat: Seat, start_step: int) -> None:
        self._segments, self._seat = segments, seat
        self._meets = seat.ranks > 1 and plan.agreement.sums
        self._next = start_step
        self._heard_s = -_HEAR_S
        self._is_over = False
        self._told_room = False
        if segments.compiled is not None:
            segments.compiled.step = start_step

    def after(self, step: int, step_s: float) -> None:
        """Look, if it is time to; `step_s` is how long the step took. All ranks that meet must call it."""
        compiled = self._segments.compiled
        if compiled is None or compiled.behind is None or self._is_over:
            return
        compiled.step = step + 1
        is_due = step >= self._next
        if is_due or time.monotonic() - self._heard_s > _HEAR_S:
            self._heard_s = time.monotonic()
            compiled.hear()
            self._tell_room(compiled.behind.no_room)
        if is_due:
            self._look(compiled, step, step_s)

    def _look(self, compiled: CompiledSegments, step: int, step_s: float) -> None:
        behind = compiled.behind
        assert behind is not None
        told: list[list[Any]] = [[min(behind.settled_until, step), behind.lost, step_s, behind.num_waiting]]
        if self._meets:
            self._seat.board.enter(step, -1, "agree on compiled segments", True)
            told = tell(told[0])
        pause_s = _PAUSE_S if any(entry[3] for entry in told) else _CALM_S
        self._next = step + max(1, min(_MOST_STEPS, int(pause_s / max(told[0][2], 1e-6))))
        lost = [(rank, entry[1]) for rank, entry in enumerate(told) if entry[1] is not None]
        if lost:
            self._give_up(*lost[0])
        else:
            self._use(compiled, min(entry[0] for entry in told), step)

    def _use(self, compiled: CompiledSegments, until: int, step: int) -> None:
        self._seat.board.enter(step, -1, "load compiled segments")
        if not compiled.take(until):
            return
        if compiled.first_step is None:
            compiled.first_step = step + 1
        if self._segments.captured is not None:
            self._segments.captured.restart()
        counted = compiled.counted()
        took, waited = (format_seconds(counted[name]) for name in ("seconds", "waited_s"))
        self._notice(
            f"from step {step + 2} on {counted['segments']} segments run compiled: {took} of compilation beside the "
            f"steps, which waited {waited} for it."
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
