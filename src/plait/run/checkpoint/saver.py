"""Checkpoints written while training goes on.

In: states, each copied at once. Out: checkpoints in a folder, and notices of what became of them. Nothing here waits
for the disk but `close`, and that no longer than the time limit. A failed or slow save is a notice, never an exception
in the training loop and never a deadlock.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.errors import PlaitError
from plait.run.checkpoint.state import TrainingState, snapshot
from plait.run.checkpoint.store import newest_step, save_checkpoint, state_bytes
from plait.threads import start_thread
from plait.units import format_bytes, format_seconds

_LOOK_S = 0.5
"""Between two looks at whether the thread that saves still lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What became of one save."""

    kind: Literal["saved", "slow", "failed", "skipped"]
    """`slow`: over its limit and still being written; `skipped`: a later state took its place before it began."""
    step: int
    """The step that was to be saved."""
    message: str
    """One sentence for a person."""
    path: Path | None = None
    """The checkpoint, once saved."""
    is_best: bool = False
    """Saved because it measured best."""
    write_s: float = 0.0
    """How long it was written."""
    pause_s: float = 0.0
    """How long training waited: the time of the copy."""
    deleted: tuple[str, ...] = ()
    """Checkpoints that made way for it."""

    def event(self) -> dict[str, Any]:
        """What whoever watches the run is told."""
        if self.kind != "saved":
            return {"notice": self.message}
        told = {name: getattr(self, name) for name in ("step", "is_best", "write_s", "pause_s")}
        return {"saved": told | {"path": str(self.path), "deleted": list(self.deleted)}}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A state to be written."""

    state: TrainingState
    is_best: bool
    pause_s: float

    @property
    def step(self) -> int:
        return self.state.step


class Saver:
    """One background thread that writes one checkpoint at a time.

    At most one state waits behind the one being written, and one that measured best; a newer one replaces it. So a slow
    disk costs at most three copies of the state in memory.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        best_step: int | None = None,
        resumed: Path | None = None,
        time_limit_s: float = 120.0,
    ) -> None:
        """`best_step` is kept whatever its age, until a better one is saved; `resumed` is what the run goes on from."""
        self._folder = folder
        self._keep = keep
        self._best_step = best_step
        self._there = newest_step(folder, resumed)
        """Of the newest checkpoint, which this run began with: a state of that step is on the disk already."""
        self._time_limit_s = time_limit_s
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: list[_Waiting] = []
        self._writing: _Waiting | None = None
        self._started_s = 0.0
        self._slow_reported = False
        self._closing = False
        self._notices: list[Notice] = []
        self._skipped: list[int] = []
        """Steps whose states were replaced while the one under way was written; told together when it is."""
        self._failed: list[Notice] = []
        """Failures in a row after the first, which was told; the last of them is told at the end."""
        self._has_failed = False

    def submit(self, state: TrainingState, *, is_best: bool = False) -> None:
        """Copy `state` and have it written, unless it is what was read; returns when the copy is made."""
        if state.step == self._there and not is_best:
            return
        began_s = time.monotonic()
        copied = snapshot(state)
        one = _Waiting(state=copied, is_best=is_best, pause_s=time.monotonic() - began_s)
        with self._changed:
            assert not self._closing, "submit after close"
            self._skipped += [other.step for other in self._waiting if other.is_best == is_best]
            self._waiting = [*(other for other in self._waiting if other.is_best != is_best), one]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint-saver", daemon=True)
                start_thread(self._thread)
            self._changed.notify_all()

    def poll(self) -> list[Notice]:
        """What happened since the last call; never waits."""
        with self._changed:
            elapsed_s = time.monotonic() - self._started_s
            if self._writing is not None and elapsed_s > self._time_limit_s and not self._slow_reported:
                self._slow_reported = True
                self._note_slow(self._writing, elapsed_s, "training goes on")
            notices, self._notices = self._notices, []
            return notices

    def close(self) -> list[Notice]:
        """Wait for what was submitted, at most the time limit; returns the remaining notices."""
        deadline_s = time.monotonic() + self._time_limit_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while not self._is_idle() and self._is_working() and time.monotonic() < deadline_s:
                self._changed.wait(min(_LOOK_S, max(0.0, deadline_s - time.monotonic())))
            if self._writing is not None:
                self._slow_reported = True
                elapsed_s = time.monotonic() - self._started_s
                self._note_slow(self._writing, elapsed_s, "it is given up; the last good checkpoint stays")
            self._skipped += [one.step for one in self._waiting]
            self._waiting.clear()
            self._note_skipped()
            self._note_failed()
        if self._thread is not None:
            self._thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
        return self.poll()

    def _is_working(self) -> bool:
        """Without memory the thread dies, whatever it catches."""
        return self._thread is not None and self._thread.is_alive()

    def _is_idle(self) -> bool:
        return self._writing is None and not self._waiting

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                one = self._waiting.pop(0)
                self._writing, self._started_s, self._slow_reported = one, time.monotonic(), False
            notice = self._save(one)
            with self._changed:
                self._note_skipped()
                self._writing = None
                if notice.kind == "failed" and self._has_failed:
                    self._failed.append(notice)
                else:
                    self._note_failed()
                    self._notices.append(notice)
                self._has_failed = notice.kind == "failed"
                self._changed.notify_all()

    def _save(self, one: _Waiting) -> Notice:
        started_s, state = time.monotonic(), one.state
        best_step = state.step if one.is_best else self._best_step
        deleted: list[str] = []
        try:
            path = save_checkpoint(
                self._folder, state, keep=self._keep, best_step=best_step, on_deleted=deleted.extend
            )
            self._best_step = best_step
        except PlaitError as error:
            return Notice(kind="failed", step=state.step, message=str(error))
        except Exception as error:  # the thread must outlive any save, or later ones would wait for ever
            what = f"the checkpoint of step {state.step} failed: {type(error).__name__}: {error}"
            return Notice(kind="failed", step=state.step, message=what)
        write_s = time.monotonic() - started_s
        what = f"checkpoint {path.name} ({format_bytes(state_bytes(state))}) written in {format_seconds(write_s)}"
        return Notice(
            kind="saved", step=state.step, message=what, path=path, is_best=one.is_best, write_s=write_s,
            pause_s=one.pause_s, deleted=tuple(deleted),
        )  # fmt: skip

    def _note_slow(self, one: _Waiting, elapsed_s: float, outcome: str) -> None:
        what = (
            f"the checkpoint of step {one.step} ({format_bytes(state_bytes(one.state))}) is not written after"
            f" {format_seconds(elapsed_s)} (limit {format_seconds(self._time_limit_s)}); {outcome}"
        )
        self._notices.append(Notice(kind="slow", step=one.step, message=what))

    def _note_skipped(self) -> None:
        if not self._skipped:
            return
        busy = f"step {self._writing.step}" if self._writing is not None else "an earlier state"
        first, last, count = self._skipped[0], self._skipped[-1], len(self._skipped)
        which = (
            f"checkpoint of step {last} is"
            if count == 1
            else f"{count} checkpoints of steps {first} to {last} are"
        )
        what = f"the {which} skipped: {busy} was still being written"
        self._notices.append(Notice(kind="skipped", step=last, message=what))
        self._skipped.clear()

    def _note_failed(self) -> None:
        if self._failed:
            more = f" (and {len(self._failed) - 1} before it)" if len(self._failed) > 1 else ""
            last = self._failed[-1]
            self._notices.append(Notice(kind="failed", step=last.step, message=f"{last.message}{more}"))
            self._failed.clear()
