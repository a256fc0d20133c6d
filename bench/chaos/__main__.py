"""Faults at random moments of real runs, over plans and phases: nothing saved is lost, nobody is left or hangs.

    python -m bench.chaos --faults 1000 --seed 7

Each fault: a small run is started in a process of its own, something happens to it at a random moment or as soon as it
is in a phase that was drawn, and once it has ended it is resumed without harm. Then: it ended in the time that is
promised; no process of it is left; the newest checkpoint that was there before is readable; every step's samples are
those of an undisturbed run, each used once, and those that a dead worker took along are few and named; and where the
plan promises it the losses are those of an undisturbed run, bit for bit. The last line of a failure says how to repeat
it alone.

A fault that came too late, or that nothing of the run met, is counted as missed and not as held, and another is made in
its place; what it left is checked all the same. The exit status is 1 where anything did not hold.

Slow disks, slow links, clocks that jump and writes that are refused need a C compiler (`shim.c`, which counts how often
each struck); a disk that is really full needs the right to mount one. What is skipped is told.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import plait
from bench.chaos.cases import CASES, HANG_S, Case, job
from bench.chaos.checks import Reference, check_result, newest_checkpoint, reference
from bench.chaos.engines import EngineRun, Engines
from bench.chaos.faults import FAULTS, Fault, can_mount, mount, unmount
from bench.chaos.runs import Ended, ForkedRun, Phase, Run
from bench.chaos.shim import Shim, start_again_with_it

LIMIT_S = 10 + 2 * HANG_S + 2 + 30 + 2 + 8
"""From a fault to the end of the run at most, as is promised, which is far more than it takes: a thread that cannot
begin 10 s, or a hang and its stacks, or a signal and what is saved then 30 s; an echo 2 s; workers that are asked, then
killed, 8 s. What slows a run down has twice the time."""
_LEFT_S = 5.0
"""After which nobody is left."""
_ATTEMPTS = 10
"""To make a fault that happens, of those that are drawn."""
ENGINE_SHARE = 0.05
"""Of faults, under engines: each of these takes as long as ten others, for its tasks are fresh interpreters."""
_ENGINE_AGAIN = 0.3
"""Of runs that an engine has started, resumed by it too; the others are resumed without."""
_TELL_EVERY = 50
"""Faults between two lines on how far it is."""
_KILLS = ("kill the parent", "kill a task", "SIGTERM engine", "no memory")
"""After which a task may not have the time to tell."""
_PHASES: tuple[Phase, ...] = ("start", "training", "evaluation", "saving", "ending")


@dataclass
class Tally:
    """What was seen of all faults."""

    held: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Faults that did not happen, and after which all was well."""
    phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of fault, phase)"""
    longest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, kind: str, seen: "Seen") -> None:
        """One more fault."""
        (self.broken if seen.wrong else self.held if seen.happened else self.missed)[name, kind] += 1
        if seen.happened:
            self.phases[kind, seen.phase] += 1
            self.longest[kind] = max(self.longest.get(kind, 0.0), seen.seconds)

    def print(self, kinds: Sequence[str], names: Sequence[str]) -> None:
        width = max(len(word) for kind in (*kinds, "missed") for word in kind.split()) + 1
        heads = [(*kind.split(" ", 1), "")[:2] for kind in (*kinds, "all", "missed")]
        print("\n" + " " * 24 + "".join(f"{first:>{width}}" for first, _ in heads))
        print(f"{'held/happened':24}" + "".join(f"{_short(second):>{width}}" for _, second in heads))
        for name in (*names, ""):
            cells = ""
            for kind in (*kinds, ""):
                good, bad = (_sum(counts, name, kind) for counts in (self.held, self.broken))
                cells += f"{f'{good}/{good + bad}' if good + bad else '-':>{width}}"
            print(f"{name or 'all':24}{cells}{_sum(self.missed, name, ''):>{width}}")
        print(f"{'missed':24}" + "".join(f"{_sum(self.missed, '', kind):>{width}}" for kind in kinds))
        print(
            f"\n{'tried in':18}"
            + "".join(f"{phase:>12}" for phase in (*_PHASES, "over"))
            + f"{'longest end':>14}"
        )
        for kind in kinds:
            cells = "".join(f"{self.phases[kind, phase] or '-':>12}" for phase in (*_PHASES, "over"))
            print(f"{kind:18}{cells}{self.longest.get(kind, 0.0):>12.1f} s")
        happened = self.held.total() + self.broken.total()
        print(f"{self.held.total()} of {happened} held; {self.missed.total()} more were missed")


def _short(words: str) -> str:
    """Without articles: a head of a column."""
    return words.removeprefix("a ").removeprefix("the ").removeprefix("more ")


def _sum(counts: Counter[tuple[str, str]], name: str, kind: str) -> int:
    """Over all names or kinds where none is given."""
    return sum(n for (by, what), n in counts.items() if name in ("", by) and kind in ("", what))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of one fault."""

    wrong: list[str]
    """What did not hold."""
    happened: bool
    phase: str
    """In which it was made."""
    seconds: float
    """From there to the end."""


class Chaos:
    """One series of faults."""

    def __init__(self, root: Path, shim: Shim | None, engines: Engines) -> None:
        self.root, self.shim, self.engines, self.tally = root, shim, engines, Tally()
        self._references: dict[str, Reference] = {}
        self._run: Run | None = None

    def try_fault(self, number: str, case: Case, kind: str, choice: random.Random) -> Seen:
        """Start, harm, resume, check."""
        if case.name not in self._references:
            place = self.root / f"reference-{case.name}"
            self._references[case.name] = reference(self._start(case, place / "run", resume=False))
        undisturbed, fault = self._references[case.name], FAULTS[kind]
        place = self.root / number
        place.mkdir()
        if fault.needs_mount:
            assert mount(place)
        run = self._start(case, place / "run", resume=False)
        self._await_moment(run, undisturbed, choice)
        before = newest_checkpoint(run.folder)
        phase: str = "over" if run.is_over() else run.phase()
        outcome = "missed" if phase == "over" else fault.do(run, choice, self.shim)
        has_begun = run.phase() != "start"  # what is quick may be further than when it was looked at
        ended = run.wait(2 * LIMIT_S if fault.slows else LIMIT_S)
        happened = outcome != "missed" and self._struck(fault, ended)
        wrong = _check_end(run, ended, kind, phase)
        run.end()
        if self.shim is not None:
            self.shim.set()
        (place / "filler").unlink(missing_ok=True)
        if fault.harmless and outcome == "done" and ended.code != 0:
            wrong.append(f"what is harmless ended it: {ended.told}")
        if fault.asks_to_end and outcome == "done" and not has_begun and ended.ended_as_ever:
            wrong.append("it was asked to end before it had begun, and did not")
        if newest_checkpoint(run.folder) < before:
            wrong.append(f"the checkpoint of step {before} is gone")
        again = case if choice.random() < _ENGINE_AGAIN else replace(case, engine=None)
        wrong += self._resume(again, undisturbed, run.folder, ended, fault.loses_a_rank)
        if fault.needs_mount:
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

    def _await_moment(self, run: Run, undisturbed: Reference, choice: random.Random) -> None:
        """A random moment of the run; or, as often, the first of a phase and a little more."""
        aim = choice.choice((None, *_PHASES))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="The number of the first fault, to repeat one.")
    parser.add_argument(
        "--plans", default="", help="Only these, joined by commas, as they stand in the table."
    )
    parser.add_argument("--kinds", default="", help="Only faults whose name holds this.")
    parser.add_argument(
        "--engines", type=float, default=ENGINE_SHARE, help="The share of faults under engines, of 0 to 1."
    )
    parser.add_argument("--verbose", action="store_true", help="A line for each fault.")
    given = parser.parse_args()
    shim_folder = start_again_with_it()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up
    names = given.plans.split(",") if given.plans else [case.name for case in CASES]
    cases = [case for case in CASES if case.name in names]
    if not given.engines:
        cases = [case for case in cases if case.engine is None]
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        engines = Engines(
            place / "engines", stack, {case.engine for case in cases if case.engine is not None}
        )
        for engine, why in engines.lacking.items():
            print(f"not tried here: runs under {engine}: {why}")
        cases = [case for case in cases if case.engine not in engines.lacking]
        chaos = Chaos(place, Shim.of_this_process(), engines)
        stack.callback(chaos.end)
        kinds = _possible([name for name in FAULTS if given.kinds in name], chaos)
        print(
            f"seed {given.seed}: {given.faults} faults of {len(kinds)} kinds over {len(cases)} ways to run",
            flush=True,
        )
        for plan in ("single", "ddp"):  # what they import is inherited by all that follow
            plait.train(job(), plan, 1, steps=1, out=place / f"warm-{plan}", trace=False)
        try_all(chaos, cases, kinds, given)
    if shim_folder is not None:
        shutil.rmtree(shim_folder, ignore_errors=True)
    chaos.tally.print(kinds, [case.name for case in cases])
    return 1 if chaos.tally.broken.total() else 0


def try_all(chaos: Chaos, cases: Sequence[Case], kinds: Sequence[str], given: argparse.Namespace) -> None:
    """One fault after the other, each until it happens."""
    only = (f" --plans {given.plans}" if given.plans else "") + (
        f" --kinds '{given.kinds}'" if given.kinds else ""
    )
    for number in range(given.first, given.first + given.faults):
        case = case_of(number, cases, given.seed, given.engines)
        suitable = [kind for kind in kinds if FAULTS[kind].suits(case)]
        if not suitable:
            continue
        for attempt in range(_ATTEMPTS):
            choice = random.Random(f"{given.seed} {number} {attempt}")
            kind = choice.choice(suitable)
            seen = chaos.try_fault(f"{number}.{attempt}", case, kind, choice)
            chaos.tally.add(case.name, kind, seen)
            if given.verbose or seen.wrong:
                word = (
                    f"WRONG: {'; '.join(seen.wrong)}" if seen.wrong else "held" if seen.happened else "missed"
                )
                told = f"{kind:16} in {seen.phase:10} {seen.seconds:5.1f} s {word}"
                print(f"{number:4} {case.name:22} {told}", flush=True)
            if seen.happened:
                break
        if seen.wrong:
            again = f"--seed {given.seed} --first {number} --faults 1 --engines {given.engines:g}{only}"
            print(f"  again: python -m bench.chaos {again}", flush=True)
        if number % _TELL_EVERY == _TELL_EVERY - 1:
            print(f"{number + 1}: {chaos.tally.broken.total()} did not hold", flush=True)


def case_of(number: int, cases: Sequence[Case], seed: int, engines: float) -> Case:
    """The way to run of a fault: a share of them is under engines, and of each kind all have their turn."""
    under = [case for case in cases if case.engine is not None]
    here = [case for case in cases if case.engine is None]
    is_under = bool(under) and (not here or random.Random(f"{seed} {number}").random() < engines)
    found = under if is_under else here
    return found[(int(number * engines) if is_under and here else number) % len(found)]


def _possible(kinds: list[str], chaos: Chaos) -> list[str]:
    """Those that can be made here; what is left out is told."""
    lacking = {"needs_shim": chaos.shim is None, "needs_mount": not can_mount(chaos.root / "disk")}
    left_out = [
        kind
        for kind in kinds
        if any(is_so and getattr(FAULTS[kind], need) for need, is_so in lacking.items())
    ]
    if left_out:
        print(f"not tried here, for lack of a C compiler or of the right to mount: {', '.join(left_out)}")
    return [kind for kind in kinds if kind not in left_out]


if __name__ == "__main__":
    sys.exit(main())
