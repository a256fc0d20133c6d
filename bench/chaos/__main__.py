"""Faults at random moments of real runs, over plans and phases: nothing saved is lost, nobody is left or hangs.

    python -m bench.chaos --faults 1000 --seed 7 --side-by-side 8

Each fault: a small run is started in a process of its own, something happens to it at a random moment or as soon as it
is in a phase that was drawn, and once it has ended it is resumed without harm. Then: it ended in the time that is
promised; no process of it is left; the newest checkpoint that was there before is readable; every step's samples are
those of an undisturbed run, each used once, and those that a dead worker took along are few and named; and where the
plan promises it the losses are those of an undisturbed run, bit for bit. The last line of a failure says how to repeat
it alone.

A fault that came too late, or that nothing of the run met, is counted as missed and not as held, and another is made in
its place; what it left is checked all the same. The exit status is 1 where anything did not hold.

Slow disks, slow links, clocks that jump and writes that are refused need a C compiler (`shim.c`, which counts how often
each struck); a disk that is really full, or turns read-only, needs the right to mount one. What is skipped is told.

Most of a fault's time is waiting, so several are under way side by side. None of them disturbs another: memory and the
size of files are limited process by process, clocks, links and disks are slowed for the processes of one session, and
each run has its own folder, or disk. What a number stands for does not depend on that.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import get_args

import plait
from bench.chaos.cases import CASES, Case, job
from bench.chaos.disks import Disk, can_mount
from bench.chaos.engines import Engines
from bench.chaos.faults import FAULTS
from bench.chaos.lanes import Found, Item, side_by_side
from bench.chaos.shim import NUM_SLOTS, Shim, start_again_with_it
from bench.chaos.tally import Seen, Tally
from bench.chaos.trial import Trials

_ATTEMPTS = 10
"""To make a fault that happens, of those that are drawn."""
ENGINE_SHARE = 0.05
"""Of faults, under engines: each of these takes as long as ten others, for its tasks are fresh interpreters."""
_TELL_EVERY = 50
"""Faults between two lines on how far it is."""


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
    parser.add_argument(
        "--side-by-side", type=int, default=1, metavar="N", help="How many are under way at a time."
    )
    parser.add_argument("--verbose", action="store_true", help="A line for each fault.")
    given = parser.parse_args()
    if not 0 < given.side_by_side <= NUM_SLOTS:
        parser.error(f"--side-by-side: 1 to {NUM_SLOTS}")
    shim_folder = start_again_with_it()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up
    names = given.plans.split(",") if given.plans else [case.name for case in CASES]
    cases = [case for case in CASES if case.name in names]
    if not given.engines:
        cases = [case for case in cases if case.engine is None]
    with ExitStack() as stack:
        if shim_folder is not None:
            stack.callback(shutil.rmtree, shim_folder, ignore_errors=True)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        engines = Engines(
            place / "engines", stack, {case.engine for case in cases if case.engine is not None}
        )
        for engine, why in engines.lacking.items():
            print(f"not tried here: runs under {engine}: {why}")
        cases = [case for case in cases if case.engine not in engines.lacking]
        kinds = _possible([name for name in FAULTS if given.kinds in name], place)
        print(
            f"seed {given.seed}: {given.faults} faults of {len(kinds)} kinds over {len(cases)} ways to run",
            flush=True,
        )
        for plan in ("single", "ddp"):  # what they import is inherited by all that follow
            plait.train(job(), plan, 1, steps=1, out=place / f"warm-{plan}", saving=plait.Saving(trace=False))
        tally = try_all(place, engines, cases, kinds, given)
    tally.print(kinds, [case.name for case in cases])
    return 1 if tally.broken.total() else 0


def try_all(
    place: Path, engines: Engines, cases: Sequence[Case], kinds: Sequence[str], given: argparse.Namespace
) -> Tally:
    """Every fault, each until it happens, after undisturbed runs of all that is needed."""
    numbers = {
        n: case_of(n, cases, given.seed, given.engines)
        for n in range(given.first, given.first + given.faults)
    }
    suitable = {case.name: [kind for kind in kinds if FAULTS[kind].suits(case)] for case in cases}
    numbers = {number: case for number, case in numbers.items() if suitable[case.name]}

    @contextmanager
    def lane(number: int, do: Callable[[Trials, Item], Found]) -> Iterator[Callable[[Item], Found]]:
        trials = Trials(place, Shim.of_this_process(number), engines)
        try:
            yield partial(do, trials)
        finally:
            trials.end()

    def try_fault(trials: Trials, number: int) -> list[tuple[str, Seen]]:
        case, tried = numbers[number], list[tuple[str, Seen]]()
        while len(tried) < _ATTEMPTS and not (tried and tried[-1][1].happened):
            choice = random.Random(f"{given.seed} {number} {len(tried)}")
            kind = choice.choice(suitable[case.name])
            seen = trials.try_fault(f"{number}.{len(tried)}", case, undisturbed[case.name], kind, choice)
            tried.append((kind, seen))
        return tried

    needed = [case for case in cases if case in numbers.values()]
    lanes = given.side_by_side
    references = side_by_side(lanes, partial(lane, do=Trials.undisturbed), needed)
    undisturbed = {case.name: found for case, found in references}
    tally = Tally()
    for count, (number, tried) in enumerate(side_by_side(lanes, partial(lane, do=try_fault), numbers), 1):
        for kind, seen in tried:
            tally.add(numbers[number].name, kind, seen)
        tell(number, numbers[number], tried, given)
        if count % _TELL_EVERY == 0:
            print(f"{count}: {tally.broken.total()} did not hold", flush=True)
    return tally


def tell(number: int, case: Case, tried: Sequence[tuple[str, Seen]], given: argparse.Namespace) -> None:
    """What did not hold, and how to see it again; or all."""
    for kind, seen in tried:
        if given.verbose or seen.wrong:
            word = f"WRONG: {'; '.join(seen.wrong)}" if seen.wrong else "held" if seen.happened else "missed"
            told = f"{kind:16} in {seen.phase:10} {seen.seconds:5.1f} s {word}"
            print(f"{number:4} {case.name:22} {told}", flush=True)
    if any(seen.wrong for _, seen in tried):
        only = f" --plans {given.plans}" if given.plans else ""
        only += f" --kinds '{given.kinds}'" if given.kinds else ""
        again = f"--seed {given.seed} --first {number} --faults 1 --engines {given.engines:g}{only}"
        print(f"  again: python -m bench.chaos {again}", flush=True)


def case_of(number: int, cases: Sequence[Case], seed: int, engines: float) -> Case:
    """The way to run of a fault: a share of them is under engines, and of each kind all have their turn."""
    under = [case for case in cases if case.engine is not None]
    here = [case for case in cases if case.engine is None]
    is_under = bool(under) and (not here or random.Random(f"{seed} {number}").random() < engines)
    found = under if is_under else here
    return found[(int(number * engines) if is_under and here else number) % len(found)]


def _possible(kinds: list[str], place: Path) -> list[str]:
    """Those that can be made here; what is left out is told."""
    no_shim = Shim.of_this_process(0) is None
    no_disk = {disk for disk in get_args(Disk) if not can_mount(place / f"disk-{disk}", disk)}
    left_out = [
        kind for kind in kinds if (no_shim and FAULTS[kind].needs_shim) or FAULTS[kind].disk in no_disk
    ]
    if left_out:
        print(f"not tried here, for lack of a C compiler or of the right to mount: {', '.join(left_out)}")
    return [kind for kind in kinds if kind not in left_out]


if __name__ == "__main__":
    sys.exit(main())
