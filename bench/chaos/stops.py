"""One rank stopped in every phase of every plan: it is named, with its stack, in the time that is stated.

    python -m bench.chaos.stops --side-by-side 4 [--plans ddp,easgd] [--hang-s 5]

A small run is started, and as soon as it is in a phase its first or its last rank (of plans with servers, the server)
is stopped by SIGSTOP and left so. Then: within what `--hang-s` stands for, the run ends with that rank's name, its
process and its Python stack, or, where the others can do without it, says that they go on; and nobody is left. Where
the rank really stood is read off the board and printed. What happens to a run's files is what `bench.chaos` asks.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import plait
from bench.chaos.cases import CASES, HANG_S, STEPS, Case, job
from bench.chaos.lanes import side_by_side
from bench.chaos.runs import ForkedRun, everybody
from plait.run.start.board import Entry, State

MOMENTS: dict[str, Callable[[ForkedRun, list[Entry]], bool]] = {
    "born": lambda run, entries: True,
    "connecting": lambda run, entries: any(entry.state is not State.STARTING for entry in entries),
    "first step": lambda run, entries: any(entry.step >= 0 for entry in entries),
    "middle": lambda run, entries: any(entry.step >= STEPS // 2 for entry in entries),
    "evaluation": lambda run, entries: run.phase() == "evaluation",
    "saving": lambda run, entries: run.phase() == "saving",
    "ending": lambda run, entries: run.phase() == "ending",
}
"""Whether a run is in a phase, as its board shows it."""
SLACK_S = 6.0
"""Beyond the limit, for looking twice, asking for stacks (2 s) and ending, on a busy machine."""
_START_S = 90.0
"""For a run to come to a phase."""
_ATTEMPTS = 3
"""Of runs that came to their end before the rank could be stopped."""


@dataclass(frozen=True)
class Stop:
    """One of them."""

    case: Case
    moment: str
    rank: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.case.name, self.moment, self.rank


@dataclass(frozen=True, kw_only=True)
class Told:
    """What came of it."""

    wrong: list[str]
    seconds: float
    """From the stop to the verdict."""
    place: str
    """Where the rank stood."""


def try_stop(place: Path, hang_s: float, stop: Stop) -> Told | None:
    """Start, stop, wait, until it was in time; None: the run, or the rank, had always ended before."""
    for _ in range(_ATTEMPTS):
        told = _try_once(Path(tempfile.mkdtemp(dir=place)) / "run", hang_s, stop)
        if told is not None:
            return told
    return None


def _try_once(folder: Path, hang_s: float, stop: Stop) -> Told | None:
    run = ForkedRun(stop.case, folder, resume=False, hang_s=hang_s)
    try:
        pid = _await_moment(run, stop)
        stopped_at = time.monotonic()
        if pid is None or not _stop(pid):
            return None
        board = run.board()
        entry = board.read(stop.rank) if board is not None else None
        limit_s = min(hang_s, 10.0) + SLACK_S
        ended = run.wait(limit_s + 30)
        text = "\n".join([ended.told.get("text", ""), *ended.told.get("notices", ())])
        at = [
            when
            for when, notice in zip(
                ended.told.get("noticed_at", ()), ended.told.get("notices", ()), strict=True
            )
            if "go on" in notice
        ]
        seconds = at[0] - stopped_at if at else ended.seconds
        had_ended = entry is not None and entry.state is State.DONE and ended.ended_as_ever
        wrong = [] if had_ended else _wrong(text, pid, stop.rank)
        if ended.code is None:
            wrong = ["it did not end"]
        elif seconds > limit_s:
            wrong.append(f"told after {seconds:.1f} s, stated are {limit_s:g}")
        time.sleep(0.5)
        if run.members():
            wrong.append("processes were left")
        return Told(wrong=wrong, seconds=seconds, place=entry.place() if entry is not None else "?")
    finally:
        run.end()


def _wrong(text: str, pid: int, rank: int) -> list[str]:
    """What the words lack."""
    wrong = []
    if f"rank {rank} (process {pid}) was found in process state T" not in text:
        wrong.append(f"it does not say that rank {rank} was stopped: {text[:600]}")
    elif f"stack of rank {rank}" not in text:
        wrong.append(f"no stack of rank {rank}: {text[:1500]}")
    return wrong


def _await_moment(run: ForkedRun, stop: Stop) -> int | None:
    deadline = time.monotonic() + _START_S
    ranks: list[int] = []
    while not run.is_over() and time.monotonic() < deadline:
        board, ranks = run.board(), ranks if len(ranks) == run.num_ranks else _ranks(run)
        if board is not None and len(ranks) > stop.rank:
            entries = [entry for entry in board.read_all() if entry is not None]
            if MOMENTS[stop.moment](run, entries):
                return ranks[stop.rank]
        time.sleep(0.0005)
    return None


def _ranks(run: ForkedRun) -> list[int]:
    """Its ranks, in their order: forks of it, each of which leads a group."""
    found = [
        (int(stat[19]), pid)
        for pid, stat in everybody()
        if stat[1] == str(run.pid) and _program(pid) == _program(run.pid)
    ]
    return [pid for _, pid in sorted(found)]


def _program(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _stop(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--plans", default="", help="Only these, joined by commas, as they stand in the table."
    )
    parser.add_argument("--moments", default="", help="Only these, joined by commas.")
    parser.add_argument("--hang-s", type=float, default=HANG_S)
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cases = [case for case in CASES if case.engine is None and case.resolved().processes > 1]
    cases = [case for case in cases if not given.plans or case.name in given.plans.split(",")]
    moments = [moment for moment in MOMENTS if not given.moments or moment in given.moments.split(",")]
    stops = [
        Stop(case, moment, rank)
        for case, moment in product(cases, moments)
        for rank in (0, case.resolved().processes - 1)
    ]
    with tempfile.TemporaryDirectory(prefix="chaos-stops-") as name:
        place = Path(name)
        for plan in ("single", "ddp"):
            plait.train(job(), plan, 1, steps=1, out=place / f"warm-{plan}", saving=plait.Saving(trace=False))

        @contextmanager
        def lane(number: int) -> Iterator[Callable[[Stop], Told | None]]:
            yield partial(try_stop, place, given.hang_s)

        found: dict[tuple[str, str, int], Told | None] = {}
        for stop, told in side_by_side(given.side_by_side, lane, stops):
            found[stop.key] = told
            word = (
                "missed" if told is None else f"{told.seconds:5.1f} s  {told.place}  {'; '.join(told.wrong)}"
            )
            print(f"{stop.case.name:24} {stop.moment:12} rank {stop.rank}  {word}", flush=True)
    show(found, [case.name for case in cases], moments)
    return 1 if any(told is not None and told.wrong for told in found.values()) else 0


def show(found: dict[tuple[str, str, int], Told | None], names: list[str], moments: list[str]) -> None:
    """A table: seconds to the verdict on the first and the last rank."""
    print("\n" + f"{'seconds to the verdict':24}" + "".join(f"{moment:>14}" for moment in moments))
    for name in names:
        cells = ""
        for moment in moments:
            told = [found[key] for key in sorted(found) if key[:2] == (name, moment)]
            words = ["-" if one is None else "WRONG" if one.wrong else f"{one.seconds:.1f}" for one in told]
            cells += f"{' '.join(words):>14}"
        print(f"{name:24}{cells}")
    happened = [told for told in found.values() if told is not None]
    held = sum(not told.wrong for told in happened)
    print(f"{held} of {len(happened)} held; {len(found) - len(happened)} had ended first")


if __name__ == "__main__":
    sys.exit(main())
