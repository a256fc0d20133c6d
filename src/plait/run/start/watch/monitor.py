"""The parent's loop over its workers: events in, results out, and one clear error when something goes wrong.

In: running processes. Out: each rank's result, or an exception: the first cause of a failure, a `HangError`,
or `Interrupted`. It never ends a process itself and never waits for one longer than its limits say: whoever
calls it ends all workers afterwards.
"""

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

from plait.errors import HangError, PlaitError, RunError
from plait.run.start.board import State
from plait.run.start.process import Process
from plait.run.start.processes import Crew
from plait.run.start.watch import failure as launch_failure
from plait.run.start.watch import hang as launch_hang
from plait.run.start.watch.failure import Failure
from plait.run.start.watch.hang import Hang
from plait.run.start.watch.interrupts import Interrupts
from plait.run.start.watch.limits import Interrupted, WatchLimits
from plait.run.start.watch.vitals import Vitals

_POLL_S = 0.1
"""Between two looks at workers that have nothing to say: a death is told within this."""
_PAUSE_S = 0.01
"""After events, before the next look: several of them then cost one. At steps of 1 ms this took half a processor."""
_SETTLE_S = 0.3
"""After a failure: time for reports that were sent before it."""
_ECHO_S = 2.0
"""After a failure that looks like an echo: time for its cause to show."""
_LINGER_S = 5.0
"""After its result: time for a worker to end by itself."""
_KILL_LOOK_S = 0.005
"""Between two looks at a worker that was killed."""
_READ_BYTES = 1 << 20
"""Read at once: the size of the pipe."""
_AT_ONCE = 2
"""Signals after which a run ends at once."""
_HOLD_S = 3.0
"""For ranks that are left to say what they hold: those that wait for others say so at once."""
_HAND_S = 120.0
"""For one of them to write it down."""


class Monitor:
    """Watches the workers of one run until all have returned or something went wrong."""

    def __init__(
        self,
        crew: Crew,
        limits: WatchLimits,
        interrupts: Interrupts,
        on_event: Callable[[int, dict[str, Any]], bool | None],
        dispensable: Collection[int] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.failures: dict[int, Failure] = {}
        self.holds: dict[int, int] = {}
        """Ranks that can hand over what they hold, others being lost -> the step with which it would go on."""
        self.handed: str | None = None
        """The checkpoint that one of them has written."""
        self.lost: set[int] = set()
        """Ranks that died, or were given up, and without which the run goes on."""
        self._last_loss: tuple[float, PlaitError] | None = None
        """Of these, when and why."""
        self._dispensable = dispensable
        self._crew = crew
        self._check = check
        self._limits = limits
        self._interrupts = interrupts
        self._on_event = on_event
        self._results: dict[int, Any] = {}
        self._result_at: dict[int, float] = {}
        self._partial: dict[int, bytes] = {process.rank: b"" for process in crew.processes}
        self._selector = selectors.DefaultSelector()
        self._oom_kills = launch_failure.count_oom_kills()
        self._failed_at: float | None = None
        self._stop_at: float | None = None
        self._suspect: Hang | None = None
        self._heard = False
        """Whether events came at the last look."""
        self._vitals = Vitals(crew.processes, time.monotonic())

    def run(self) -> list[Any]:
        """Watch to the end; returns each rank's result."""
        for process in self._crew.processes:
            self._selector.register(process.pipe, selectors.EVENT_READ, process)
        try:
            while True:
                running = self._collect()
                self._check()
                if self._failed_at is not None:
                    self._judge_failure(self._failed_at, running)
                elif not running:
                    break
                else:
                    self._judge_hang()
                self._judge_interrupt()
        finally:
            self._selector.close()
        if self._interrupts.count:
            raise self._interrupted()
        return self._all_results()

    def _all_results(self) -> list[Any]:
        return [self._results.get(rank) for rank in range(self._crew.ranks)]

    def _interrupted(self) -> Interrupted:
        returned = len(self._results) + len(self.lost) == self._crew.ranks
        return Interrupted(number=self._interrupts.number, results=self._all_results(), returned=returned)

    def _collect(self) -> bool:
        """Take in what the workers sent and who has ended; tell whether any still runs."""
        if self._heard:
            time.sleep(_PAUSE_S)
        self._heard = False
        if self._selector.get_map():
            ready = self._selector.select(_POLL_S)
        else:
            time.sleep(0.01)  # all pipes are closed, but somebody has not ended yet
            ready = []
        for key, _ in ready:
            self._read(key.data)
        running = False
        for process in self._crew.processes:
            if process.poll() is None:
                running = True
                if time.monotonic() - self._result_at.get(process.rank, time.monotonic()) > _LINGER_S:
                    process.signal(signal.SIGKILL)  # it has returned; something of the user's keeps it
            elif not self._is_settled(process.rank):
                self._read(process)
                self._note_death(process)
        return running

    def _read(self, process: Process) -> None:
        """Read one pipe until it is empty; at its end stop listening."""
        while True:
            try:
                data = os.read(process.pipe, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                if process.pipe in self._selector.get_map():
                    self._selector.unregister(process.pipe)
                return
            self.feed(process.rank, data)

    def feed(self, rank: int, data: bytes) -> None:
        """Take in what a rank wrote."""
        *lines, rest = (self._partial[rank] + data).split(b"\n")
        self._partial[rank] = rest
        for line in lines:
            self._take(rank, json.loads(line))

    def lost_for_good(self, error: RunError) -> tuple[int, ...]:
        """Ranks that were killed, whose host is gone, or that do not come; those that raised are no such loss."""
        if isinstance(error, HangError):
            return error.missing
        found = [f for f in self.failures.values() if f.told is None]
        return tuple(sorted(f.rank for f in found if f.lost is not None or (f.exit_code or 0) < 0))

    def hand_over(self, lost: Collection[int], beyond: int = -1) -> str | None:
        """Have a rank that is left write down what it holds, where that is all there is, and of a step `beyond` that
        one; the checkpoint."""
        with selectors.DefaultSelector() as self._selector:
            left = [p for p in self._crew.processes if p.rank not in lost and p.poll() is None]
            for process in left:
                self._selector.register(process.pipe, selectors.EVENT_READ, process)
                process.tell_lost()
            self._collect_until(
                lambda: all(p.rank in self.holds or p.poll() is not None for p in left), _HOLD_S
            )
            for rank in sorted(self.holds, key=lambda rank: (-self.holds[rank], rank)):
                if self.handed is None and self.holds[rank] > beyond:
                    self._let_write(self._crew.of(rank))
        return self.handed

    def _let_write(self, process: Process) -> None:
        self._crew.board.giver = process.rank
        process.tell_giver()
        self._collect_until(lambda: self.handed is not None or process.poll() is not None, _HAND_S)

    def _collect_until(self, is_over: Callable[[], bool], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not is_over() and time.monotonic() < deadline and self._interrupts.count < _AT_ONCE:
            for key, _ in self._selector.select(_POLL_S):
                self._read(key.data)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "event" in message and "holds" in message["event"]:
            self.holds[rank] = message["event"]["holds"]
        elif "event" in message and "handed" in message["event"]:
            self.handed = message["event"]["handed"]
        elif "event" in message:
            self._heard = True
            if self._on_event(rank, message["event"]):
                self._crew.board.request_stop()
        elif "result" in message:
            self._results[rank] = message["result"]
            self._result_at[rank] = time.monotonic()
        else:
            told, process = message["error"], self._crew.of(rank)
            at_ns = told["at_ns"] + process.clock_ns
            self._fail(
                Failure(rank=rank, at_ns=at_ns, told=told, exit_code=None, stack="", host=process.host)
            )

    def _is_settled(self, rank: int) -> bool:
        return rank in self._results or rank in self.failures or rank in self.lost

    def _note_death(self, process: Process) -> None:
        if self._is_settled(process.rank):
            return
        stack = os.pread(process.stacks, _READ_BYTES, 0).decode(errors="replace")
        failure = Failure(
            rank=process.rank,
            at_ns=time.monotonic_ns(),
            told=None,
            exit_code=process.exit_code,
            stack=launch_hang.trim_stack(stack),
            host=process.host,
            lost=process.why_lost(),
        )
        entry = self._crew.board.read(failure.rank, writer_is_dead=True)
        spared = set(self._dispensable) - self.lost
        if process.rank in spared and len(spared) > 1 and entry is not None and entry.has_begun:
            oom_kills = launch_failure.count_oom_kills() - self._oom_kills
            told = launch_failure.to_error(failure, entry, self._crew.ranks, oom_kills)
            self._do_without(failure.rank, told)
        else:
            self._fail(failure)

    def _do_without(self, rank: int, why: PlaitError) -> None:
        """Go on without a rank, and tell the others and the user."""
        self.lost.add(rank)
        self._last_loss = (time.monotonic(), why)
        self._crew.board.mark_gone(rank)
        self._on_event(rank, {"lost": why.what})

    def _fail(self, failure: Failure) -> None:
        self.failures[failure.rank] = failure
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def _judge_failure(self, failed_at: float, running: bool) -> None:
        cause = launch_failure.first_cause(self.failures.values())
        patience_s = _ECHO_S if cause.is_communication else _SETTLE_S
        if running and time.monotonic() - failed_at < patience_s:
            return
        if (
            cause.is_communication
            and self._last_loss is not None
            and failed_at - self._last_loss[0] < _ECHO_S
        ):
            raise self._last_loss[1]  # it could not go on without it after all
        board, ranks = self._crew.board, self._crew.ranks
        entry = board.read(cause.rank, writer_is_dead=cause.told is None)
        if cause.is_timeout and running and entry is not None and entry.state is State.WAITING:
            # The backend's own limit was shorter than ours: the same hang, and its cause is a rank that still
            # runs.
            missing = tuple(rank for rank in range(ranks) if rank not in self.failures)
            hang = Hang(operation=entry, waiting=tuple(sorted(self.failures)), missing=missing)
            raise launch_hang.to_error(hang, board.read_all(), self._crew.processes, self._limits.hang_s)
        raise launch_failure.to_error(cause, entry, ranks, launch_failure.count_oom_kills() - self._oom_kills)

    def _judge_hang(self) -> None:
        board, processes = self._crew.board, self._crew.processes
        hang_s, now_s = self._limits.hang_s, time.monotonic()
        self._vitals.look(board.read_all(), now_s)
        stopped_s = self._vitals.stopped_s(now_s)
        # One that was stopped in the middle of writing its slot writes no more of it.
        entries = [board.read(rank, writer_is_dead=stopped_s[rank] > 0) for rank in range(self._crew.ranks)]
        hang = launch_hang.find_hang(
            entries,
            time.monotonic_ns(),
            launch_hang.Patience(hang_s=hang_s),
            stopped_s,
            self._vitals.idle_s(now_s),
            self._dispensable,
            [process.rank for process in processes if process.is_silent],
        )
        # Seen twice with nobody having moved: for a moment a rank may be between two entries.
        if hang is not None and self._suspect is not None and self._suspect.operation == hang.operation:
            self._give_up(hang, launch_hang.to_error(hang, entries, processes, hang_s))
            hang = None
        self._suspect = hang

    def _give_up(self, hang: Hang, error: HangError) -> None:
        """End the run; or, where it can do without the ranks that do not come, only those."""
        spared = set(self._dispensable) - self.lost
        entries = [self._crew.board.read(rank) for rank in hang.missing if not self._is_settled(rank)]
        begun = {entry.rank for entry in entries if entry is not None and entry.has_begun}
        if not begun or begun != set(hang.missing) or not begun < spared:
            raise error
        for rank in hang.missing:
            process = self._crew.of(rank)
            process.signal(signal.SIGKILL)
            deadline = time.monotonic() + _LINGER_S
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_KILL_LOOK_S)
            self._read(process)  # what it has done counts, also what it did while it showed its stack
            self._do_without(rank, error)

    def _judge_interrupt(self) -> None:
        if not self._interrupts.count:
            return
        now = time.monotonic()
        if self._stop_at is None:
            self._stop_at = now
            self._crew.board.request_stop()
        if self._interrupts.count >= _AT_ONCE or now - self._stop_at > self._limits.grace_s:
            raise self._interrupted()
