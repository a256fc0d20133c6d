"""Whether the processes of a run do anything at all: processor time, bytes, and entries on the board.

In: the board's entries and /proc. Out: for each rank, for how long it has been stopped by a signal, and for how long it
has done nothing. Looked at about once a second. Time in which this process itself did not run does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.run.start.board import Entry
from plait.run.start.process import Process

_LOOK_S = 0.5
"""Between two looks at the processes: a stopped one is told within a second."""
_BUSY_SHARE = 0.02
"""Of a processor: less is the noise of threads that look around."""
_GAP_S = 5.0
"""Between two looks: longer, and this process was stopped itself, or the machine slept."""


@dataclass(kw_only=True, slots=True)
class _Pulse:
    """What was last seen of one rank."""

    beats: int = -1
    processor_s: float = 0.0
    num_bytes: int = 0
    moved_at: float
    stopped_at: float | None = None


class Vitals:
    """Remembers when each rank last moved."""

    def __init__(self, processes: Sequence[Process], now_s: float) -> None:
        self._processes = processes
        self._pulses = [_Pulse(moved_at=now_s) for _ in processes]
        self._looked_at = now_s

    def look(self, entries: Sequence[Entry | None], now_s: float) -> None:
        """Take in what has changed, unless that was done just before."""
        elapsed_s = now_s - self._looked_at
        if elapsed_s < _LOOK_S:
            return
        self._looked_at = now_s
        for process, pulse, entry in zip(self._processes, self._pulses, entries, strict=True):
            state, processor_s, num_bytes = process.pulse()
            beats = entry.beats if entry is not None else pulse.beats
            busy = processor_s - pulse.processor_s > _BUSY_SHARE * elapsed_s
            if busy or beats != pulse.beats or num_bytes != pulse.num_bytes or elapsed_s > _GAP_S:
                pulse.moved_at = now_s
            if state != "T":
                pulse.stopped_at = None
            elif pulse.stopped_at is None or elapsed_s > _GAP_S:
                pulse.stopped_at = now_s
            pulse.beats, pulse.processor_s, pulse.num_bytes = beats, processor_s, num_bytes

    def idle_s(self, now_s: float) -> list[float]:
        """For how long each rank has done nothing; 0 for less than a look."""
        return [idle if (idle := now_s - p.moved_at) > 2 * _LOOK_S else 0.0 for p in self._pulses]

    def stopped_s(self, now_s: float) -> list[float]:
        """For how long each rank has been stopped by a signal."""
        return [0.0 if p.stopped_at is None else max(1e-9, now_s - p.stopped_at) for p in self._pulses]
