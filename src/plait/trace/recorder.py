"""Record what one rank does, at a cost that training does not notice.

In: once per instruction its description, then its times whenever it was executed. Out: the rank's trace file,
on `flush`. It never grows without bound: it keeps every span of the first steps and of the latest ones, and
sums for all of them. It never reads the clock itself: the caller passes `time.perf_counter_ns()`, so that
kernels timed on a device fit too.
"""

import time
from array import array
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.trace.files import Description, RankFile, write_rank
from plait.trace.span import KINDS, LANES, Lane, SpanKind, Sweep, Totals

_OPEN_LIMIT = 50_000
"""Spans of one step after which they are folded all the same: a server may stay in one step for hours."""


def clock_offset_ns() -> int:
    """Add this to `time.perf_counter_ns()` to get nanoseconds since the epoch.

    The tightest of a few readings: a reading that the scheduler interrupted would shift a whole rank. Ranks
    of one host share the performance counter, so a launcher that passes one offset to all of them aligns them
    exactly.
    """
    best_width, best_offset = None, 0
    for _ in range(16):
        before = time.perf_counter_ns()
        epoch = time.time_ns()
        after = time.perf_counter_ns()
        if best_width is None or after - before < best_width:
            best_width, best_offset = after - before, epoch - (before + after) // 2
    return best_offset


class Recorder:
    """The spans of one rank: `describe` an instruction once, `record` each execution, `flush` at the end."""

    __slots__ = (
        "_background_ns",
        "_capacity",
        "_communication",
        "_communication_ns",
        "_compute",
        "_compute_ns",
        "_descriptions",
        "_end_ns",
        "_first_steps",
        "_head",
        "_last_step",
        "_num_bytes",
        "_num_first",
        "_num_held",
        "_num_steps",
        "_offset_ns",
        "_open",
        "_recent",
        "_recent_steps",
        "_step",
        "_warm_ns",
        "rank",
    )

    def __init__(
        self,
        rank: int,
        capacity: int = 200_000,
        *,
        first_steps: int = 5,
        recent_steps: int = 50,
        offset_ns: int | None = None,
    ) -> None:
        if capacity < 1 or first_steps < 1 or recent_steps < 1:
            limits = f"capacity={capacity}, first_steps={first_steps}, recent_steps={recent_steps}"
            raise ValueError(f"{limits}: each must be at least 1")
        self.rank = rank
        self._capacity = capacity
        self._first_steps = first_steps
        self._recent_steps = recent_steps
        self._offset_ns = clock_offset_ns() if offset_ns is None else offset_ns
        self._descriptions: dict[int, Description] = {}
        self._open: list[tuple[int, int, int]] = []
        self._step: int | None = None
        self._last_step: int | None = None
        self._head: list[tuple[int, array[int]]] = []
        self._recent: deque[tuple[int, array[int]]] = deque()
        self._num_held = 0
        self._num_steps = 0
        self._num_first = 0
        self._warm_ns: int | None = None
        self._end_ns = 0
        self._compute = Sweep(0)
        self._communication = Sweep(0)
        self._compute_ns: dict[str, float] = dict.fromkeys(KINDS, 0)
        self._communication_ns: float = 0
        self._background_ns = 0
        self._num_bytes = 0

    def describe(
        self,
        instruction: int,
        kind: SpanKind,
        name: str,
        lane: Lane = "compute",
        micro_batch: int | None = None,
        stage: int | None = None,
        num_bytes: int = 0,
    ) -> None:
        """Say once what an instruction is; its spans then carry its id only."""
        if kind not in KINDS:
            raise ValueError(f"instruction {instruction} has kind {kind!r}; the kinds are {', '.join(KINDS)}")
        if lane not in LANES:
            raise ValueError(f"instruction {instruction} has lane {lane!r}; the lanes are {', '.join(LANES)}")
        self._descriptions[instruction] = Description(
            instruction, kind, name, lane, micro_batch, stage, num_bytes
        )

    def record(self, step: int, instruction: int, start_ns: int, end_ns: int) -> None:
        """Note that a described instruction ran between two readings of `time.perf_counter_ns`."""
        if step != self._step or len(self._open) >= _OPEN_LIMIT:
            self._close(step)
        self._open.append((instruction, start_ns, end_ns))

    def flush(self, path: Path, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write everything recorded so far to one file, atomically; recording may go on after it."""
        self._close(self._step)
        kept = [*self._head, *self._recent]
        spans: list[tuple[int, int, int, int]] = []
        for step, flat in kept:
            spans.extend((step, *span) for span in zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
        write_rank(
            path,
            RankFile(
                rank=self.rank,
                offset_ns=self._offset_ns,
                descriptions=self._descriptions,
                spans=spans,
                totals=self._totals(),
                metadata=metadata or {},
            ),
        )

    def _close(self, step: int | None) -> None:
        """Fold the open step into the sums, keep its spans where they belong, and open the next one."""
        if self._open and self._step is not None:
            self._open.sort(key=_start_ns)
            self._fold(self._open)
            self._keep(self._step, self._open)
        if step is not None and (self._last_step is None or step > self._last_step):
            self._num_steps += 1
            self._last_step = step
        self._open = []
        self._step = step

    def _fold(self, spans: list[tuple[int, int, int]]) -> None:
        warming = self._num_steps <= 1
        for instruction, start_ns, end_ns in spans:
            try:
                description = self._descriptions[instruction]
            except KeyError:
                raise ValueError(
                    f"instruction {instruction} of rank {self.rank} was never described"
                ) from None
            if description.lane == "compute":
                counted = self._compute.add(start_ns, end_ns)
                if not warming:
                    self._compute_ns[description.kind] += counted
                if end_ns > self._end_ns:
                    self._end_ns = end_ns
            elif description.lane == "communication":
                counted = self._communication.add(start_ns, end_ns)
                if not warming:
                    self._communication_ns += counted
            elif not warming:
                self._background_ns += max(0, end_ns - start_ns)
            if not warming and description.kind == "communication":
                self._num_bytes += description.num_bytes
        if warming and self._end_ns:
            self._warm_ns = self._end_ns

    def _keep(self, step: int, spans: list[tuple[int, int, int]]) -> None:
        flat = array("q", (number for span in spans[: self._capacity] for number in span))
        size = len(flat) // 3
        if self._num_first < self._first_steps and self._num_held + size <= self._capacity:
            self._head.append((step, flat))
            self._num_first += 1
        else:
            self._recent.append((step, flat))
        self._num_held += size
        while self._recent and (len(self._recent) > self._recent_steps or self._num_held > self._capacity):
            self._num_held -= len(self._recent.popleft()[1]) // 3

    def _totals(self) -> Totals | None:
        """Sums over the run, where there are the two steps after the warm-up that a mean needs."""
        if self._num_steps < 3 or self._warm_ns is None:
            return None
        return Totals(
            rank=self.rank,
            num_steps=self._num_steps - 1,
            wall_s=(self._end_ns - self._warm_ns) * 1e-9,
            compute_s={kind: ns * 1e-9 for kind, ns in self._compute_ns.items()},
            communication_s=self._communication_ns * 1e-9,
            background_s=self._background_ns * 1e-9,
            num_bytes=self._num_bytes,
        )


def _start_ns(span: tuple[int, int, int]) -> int:
    return span[1]
