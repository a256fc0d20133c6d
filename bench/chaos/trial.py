"""One fault: a run is started, harmed, resumed and checked."""

import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

from bench.chaos.cases import HANG_S, Case
from bench.chaos.checks import Reference, check_result, newest_checkpoint, reference
from bench.chaos.disks import mend, mount, unmount
from bench.chaos.engines import JOIN_S, EngineRun, Engines
from bench.chaos.faults import FAULTS, Fault
from bench.chaos.runs import PHASES, Ended, ForkedRun, Run
from bench.chaos.shim import Shim
from bench.chaos.tally import Seen

LIMIT_S = 10 + 2 * HANG_S + 2 + 30 + 2 + 5
"""From a fault to the end of the run at most, as is promised, which is far more than it takes: a thread that cannot
begin 10 s, or a hang and its stacks, or a signal and what is saved then 30 s; an echo 2 s; workers that are
killed 5 s. What slows a run down has twice the time."""
_LEFT_S = 5.0
"""After which nobody is left."""
_ENGINE_AGAIN = 0.3
"""Of runs that an engine has started, resumed by it too; the others are resumed without."""
_KILLS = ("kill the parent", "kill a task", "SIGTERM engine", "kill engine", "no memory")
"""After which a task may not have the time to tell."""


class Trials:
    """Faults, one after the other; several of these may be under way side by side."""

    def __init__(self, root: Path, shim: Shim | None, engines: Engines) -> None:
        self.root, self.shim, self.engines = root, shim, engines
        self._run: Run | None = None

    def undisturbed(self, case: Case) -> Reference:
        """A run that nothing happens to."""
        place = self.root / f"reference-{case.name}"
        return reference(self._start(case, place / "run", resume=False))

    def try_fault(
        self, number: str, case: Case, undisturbed: Reference, kind: str, choice: random.Random
    ) -> Seen:
        """Start, harm, resume, check."""
        fault = FAULTS[kind]
        place = self.root / number
        place.mkdir()
        if fault.disk is not None:
            assert mount(place, fault.disk)
        run = self._start(case, place / "run", resume=False)
        self._await_moment(run, undisturbed, fault, choice)
        before = newest_checkpoint(run.folder)
        phase: str = "over" if run.is_over() else run.phase()
        outcome = "missed" if phase == "over" else fault.do(run, choice, self.shim)
        has_begun = run.phase() != "start"  # what is quick may be further than when it was looked at
        joins_s = JOIN_S if case.engine is not None and phase == "start" else 0  # for a task that never comes
        ended = run.wait(2 * LIMIT_S if fault.slows else LIMIT_S + joins_s)
        happened = outcome != "missed" and self._struck(fault, ended)
        wrong = _check_end(run, ended, kind, phase)
        run.end()
        if self.shim is not None:
            self.shim.set()
        if fault.disk is not None:
            mend(place, fault.disk)
        if fault.harmless and outcome == "done" and ended.code != 0:
            wrong.append(f"what is harmless ended it: {ended.told}")
        if fault.asks_to_end and outcome == "done" and not has_begun and ended.ended_as_ever:
            wrong.append("it was asked to end before it had begun, and did not")
        if newest_checkpoint(run.folder) < before:
            wrong.append(f"the checkpoint of step {before} is gone")
        again = case if choice.random() < _ENGINE_AGAIN else replace(case, engine=None)
        wrong += self._resume(again, undisturbed, run.folder, ended, fault.loses_a_rank)
        if fault.disk is not None:
            unmount(place)
        shutil.rmtree(place, ignore_errors=True)
        return Seen(wrong=wrong, happened=happened or bool(wrong), phase=phase, seconds=ended.seconds)

    def _start(self, case: Case, folder: Path, *, resume: bool) -> Run:
        start = ForkedRun if case.engine is None else self.engines.start
        self._run = start(case, folder, resume=resume)
        return self._run

    def end(self) -> None:
        """Leave nobody of the run that is under way."""
        if self._run is not None:
            self._run.end()

    def _struck(self, fault: Fault, ended: Ended) -> bool:
        """Whether the run met what was done to it."""
        if fault.seen == "by the shim":
            assert self.shim is not None
            return self.shim.hits > 0
        return fault.seen == "at once" or not ended.ended_as_ever

    def _await_moment(self, run: Run, undisturbed: Reference, fault: Fault, choice: random.Random) -> None:
        """A random moment of the run; or, as often, the first of a phase and a little more."""
        aim = choice.choice((None, *PHASES) if fault.aim is None else (fault.aim,))
        after_s = choice.uniform(0.05, 0.95) * undisturbed.seconds
        if aim is None:
            time.sleep(after_s)
            return
        deadline = time.monotonic() + 2 * undisturbed.seconds
        while not run.is_over() and run.phase() != aim and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(choice.choice((0.0, 0.002, 0.01)))

    def _resume(
        self, case: Case, undisturbed: Reference, folder: Path, ended: Ended, loses_a_rank: bool
    ) -> list[str]:
        """Go on without harm where that is needed, and check what came of all."""
        if ended.code != 0 or ended.told.get("stopped") == "interrupted":
            resumable = newest_checkpoint(folder) >= 0
            if not resumable:
                shutil.rmtree(folder, ignore_errors=True)
            resumed = self._start(case, folder, resume=resumable).wait(180)
            if resumed.code != 0:
                return [f"the resume failed: {resumed.told}"]
            loses_a_rank = True
        lost = 0 if not loses_a_rank else 1 if ended.code == 0 else case.resolved().mesh.size
        return check_result(case, undisturbed, folder, lost_ranks=lost)


def _check_end(run: Run, ended: Ended, kind: str, phase: str) -> list[str]:
    """It ended in time, with a word, and left nobody."""
    if ended.code is None:
        return ["it did not end in time"]
    wrong = []
    deadline = time.monotonic() + _LEFT_S
    while (left := run.members()) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        wrong.append(f"{len(left)} processes were left")
    error, text = ended.told.get("error"), ended.told.get("text", "")
    no_memory = kind == "no memory" and (
        error == "MemoryError" or "Cannot allocate memory" in text or not error
    )
    if error in ("TRACEBACK", "MemoryError") and not no_memory:
        wrong.append(f"an error that is not ours: {text}")
    is_silent = ended.code > 0 and not error and not no_memory
    if isinstance(run, EngineRun):  # whose status is told by itself, unless it was killed
        is_silent = ended.code < 0 and phase != "start" and kind not in _KILLS
    if is_silent:
        wrong.append(f"it ended without a word: {text}")
    return wrong
