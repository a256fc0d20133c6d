"""Try a job with several arguments, on folds of its data, side by side: everything that `plait try` does but show it.

In: a job that is named, and what its arguments may be. Out: a `Tuned`, and a folder with a run folder for each trial
and fold, results.jsonl, and a page. The same call goes on with what is in that folder.
"""

import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.api.inputs.given import given_job, name_of
from plait.api.inputs.settings import write_arguments
from plait.api.inputs.trust import anywhere
from plait.api.train import AUTO
from plait.api.trials.board import REDUCTION, Board, Key, Outcome
from plait.api.trials.request import Request, claim, engine_words, places_for
from plait.api.trials.runs import Running, interrupt, outcome_of, start
from plait.api.trials.space import Range, Space, as_taken, drawn, one_by_one, proposer, read_space
from plait.errors import JobError, UsageError
from plait.files.write import write_whole
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.named.reference import check_arguments
from plait.options import Changes, Elsewhere, Listener, Tries
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.report.record import read_run
from plait.report.tries_page import Curve, tries_page
from plait.run.record.evaluate import Aim, aim_of
from plait.run.record.lock import locked

_LOOKED_AT = 10
"""Arguments with which a job may fail before the try is refused."""
_RUNGS = 3
"""Of asha: a ninth of the steps, a third, all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One set of arguments, tried on every fold."""

    trial: int
    """Its number, from 0: that of its run folders."""
    args: Mapping[str, Any]
    """Of the job function."""
    scores: tuple[float, ...]
    """What was measured last on each fold."""
    steps: int
    """How far it was trained."""
    state: Literal["finished", "stopped", "failed"]
    """`stopped`: others were better after as many steps."""
    why: str | None
    """It failed."""

    @property
    def mean(self) -> float:
        """Over the folds."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation over the folds; 0 of one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What a try has found."""

    folder: Path
    """trials/ with the run folders, results.jsonl, try.json, try.html."""
    metric: str
    """What was compared."""
    tried: tuple[Tried, ...]
    """The best first; those that were stopped and those that failed after those that finished."""
    command: str | None
    """Trains the best on all of the data; None where all failed."""

    @property
    def best(self) -> Tried | None:
        """The winner; None where all failed."""
        return self.tried[0] if self.tried and self.tried[0].state == "finished" else None


@kept_generators()
def tune(
    job: str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    changes: Changes,
    tries: Tries = Tries(),
    steps: int | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    elsewhere: Elsewhere = Elsewhere(),
    listener: Listener | None = None,
) -> Tuned:
    """Train `job` with several arguments and compare its last evaluations; the same call goes on after a kill.

    `changes.args` is what may be tried: {"lr": [1e-4, 3e-4], "width": "64:256", "wd": "1e-5:1e-1:log"}, as on the
    command line. With `tries.folds` each trial is trained so many times, each time on all but one part of the data, and
    evaluated on that part; without, on the job's own `evaluate`. `tries.search`: every combination (`grid`), at random,
    by `optuna`, or `asha`, at random where losers are stopped early. With an engine (`elsewhere`) each run is
    started by it, one at a time unless `tries.parallel` says more.
    """
    if not isinstance(job, str) or isinstance(plan, Plan):
        raise UsageError(
            "tune starts runs that find their job and their plan by name.",
            fix='name them: tune("path.py:job", "ddp", 2, ...); a plan may be a .yaml file.',
        )
    space = read_space(changes.args)
    request = Request(
        job=anywhere(job), plan=None if plan is None else str(plan), ranks=ranks, changes=changes, tries=tries,
        steps=steps, device=device, engine=engine_words(elsewhere, ranks),
    )  # fmt: skip
    some = drawn(space, _LOOKED_AT, tries.seed)
    taken = check_arguments(request.job, [*some, *one_by_one(space, some[0])])
    space = as_taken(space, taken[0])
    given, of_plan = _looked_at(request, some)
    if given.evaluate is None:
        raise UsageError(
            "the job has no evaluation data to compare trials by.",
            fix="give Job(evaluate=...), or --folds 5.",
        )
    aim = aim_of(tries.metric, given, "--metric")
    chosen = 0 if plan == AUTO else resolve(plan, ranks, of_plan, changes.mesh).ranks
    folder = claim(Path(out) if out is not None else None, request)
    places = places_for(request, chosen)
    tell = listener or (lambda event: None)
    tell({"told": f"{len(places)} at a time; {folder} keeps what is done, and the same call goes on in it"})
    with locked(folder):
        return _tried(request, space, folder, aim, places, tell)


def _tried(
    request: Request,
    space: Space,
    folder: Path,
    aim: Aim,
    places: list[dict[str, str]],
    tell: Listener,
) -> Tuned:
    """Run all that is asked for in a folder that nobody else uses meanwhile."""
    tries = request.tries
    rungs = _RUNGS if tries.search == "asha" else 1
    board = Board(
        folder / "results.jsonl", folds=tries.folds, rungs=rungs, mode=aim.mode,
        propose=proposer(tries.search, space, tries.trials, tries.seed, aim.mode),
        varied=[name for name, values in space.items() if isinstance(values, Range) or len(values) > 1],
    )  # fmt: skip
    try:
        _work(board, request, folder, aim.metric, rungs, places, tell)
        if board.hopeless is not None:
            tell({"told": f"all that were run failed alike; no more are run: {board.hopeless}"})
    finally:
        board.close()
    tuned = _tuned(board, request, folder, aim.metric, aim.mode, rungs)
    write_whole(folder / "try.html", _page(tuned, name_of(request.job), tries.folds))
    return tuned


def _looked_at(request: Request, some: Sequence[Mapping[str, Any]]) -> tuple[Job, dict[str, Any]]:
    """The job with the first arguments with which its function does not fail, and what the settings say of the plan."""
    problem: JobError | None = None
    for args in some:
        try:
            return given_job(request.job, request.changed(args, 0))
        except JobError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _work(
    board: Board,
    request: Request,
    folder: Path,
    metric: str,
    rungs: int,
    places: list[dict[str, str]],
    listener: Listener,
) -> None:
    """Run what the board wants, until it wants nothing more."""
    running: dict[Key, Running] = {}
    with _ended(running):
        while True:
            free = [
                place for place in range(len(places)) if place not in {run.slot for run in running.values()}
            ]
            while free and (key := board.next()) is not None:
                args, place = board.args[key.trial], free.pop(0)
                try:
                    steps = request.steps if rungs == 1 else _steps(request, args, key, rungs)
                except JobError as error:
                    board.take(key, Outcome(failed=error.what))
                    listener({"told": _line(board, request, key, metric)})
                    free.insert(0, place)
                    continue
                own = _folder(folder, request, key)
                running[key] = start(
                    request.words(args, key.fold), own, place, places[place], steps, request.engine
                )
            if not running:
                return
            for key, run in list(running.items()):
                if (code := run.poll()) is not None:
                    del running[key]
                    run.task.close()
                    board.take(key, outcome_of(run, code, metric))
                    listener({"told": _line(board, request, key, metric)})


def _steps(request: Request, args: Mapping[str, Any], key: Key, rungs: int) -> int:
    """How far a run goes on its rung."""
    return max(1, request.total_steps(args, key.fold) // int(REDUCTION ** (rungs - 1 - key.rung)))


@contextmanager
def _ended(running: dict[Key, Running]) -> Iterator[None]:
    """Leave no run behind: interrupted, each saves first."""
    try:
        yield
    except KeyboardInterrupt:
        interrupt(list(running.values()))
        raise
    finally:
        for run in running.values():
            run.task.close()


def _folder(folder: Path, request: Request, key: Key) -> Path:
    part = f"-fold{key.fold + 1}" if request.tries.folds > 1 else ""
    return folder.absolute() / "trials" / f"{key.trial:03d}{part}"


def _line(board: Board, request: Request, key: Key, metric: str) -> str:
    outcome, part = (
        board.outcomes[key],
        f" fold {key.fold + 1}/{request.tries.folds}" if request.tries.folds > 1 else "",
    )
    what = f"{metric} {outcome.score:.5g}" if outcome.score is not None else f"failed: {outcome.failed}"
    named = " ".join(write_arguments(board.args[key.trial]))
    return f"trial {key.trial}{part} ({named}): {what}, {outcome.steps} steps in {outcome.seconds:.1f} s"


def _tuned(board: Board, request: Request, folder: Path, metric: str, mode: str, rungs: int) -> Tuned:
    rows = []
    for trial, args in board.args.items():
        rung, why = board.rung(trial), board.failed(trial)
        state: Any = "failed" if why else "finished" if rung == rungs - 1 else "stopped"
        steps = max((found.steps for key, found in board.outcomes.items() if key.trial == trial), default=0)
        scores = tuple(board.scores(trial, rung))
        rows.append(Tried(trial=trial, args=args, scores=scores, steps=steps, state=state, why=why))
    states, sign = ("finished", "stopped", "failed"), 1.0 if mode == "min" else -1.0
    rows.sort(
        key=lambda row: (states.index(row.state), -row.steps * (row.state == "stopped"), sign * row.mean)
    )
    best = rows[0] if rows and rows[0].state == "finished" else None
    steps_told = [] if request.steps is None else ["--steps", str(request.steps)]
    command = None if best is None else shlex.join(["plait", "run", *request.command(best.args), *steps_told])
    return Tuned(folder=folder, metric=metric, tried=tuple(rows), command=command)


def _page(tuned: Tuned, name: str, folds: int) -> str:
    curves = []
    for row in tuned.tried:
        path = tuned.folder / "trials" / (f"{row.trial:03d}-fold1" if folds > 1 else f"{row.trial:03d}")
        found = read_run(path).evaluations if path.is_dir() else ()
        points = [(line["step"], line["evaluate"][tuned.metric]) for line in found]
        curves.append(Curve(name=f"trial {row.trial}", points=points, is_best=row is tuned.best))
    heads, cells = table(tuned)
    return tries_page(name, tuned.command, heads, cells, tuned.metric, curves)


def table(tuned: Tuned) -> tuple[list[str], list[list[str]]]:
    """Heads and cells, for the terminal and the page."""
    names = list(tuned.tried[0].args) if tuned.tried else []
    rows = [
        [
            str(row.trial),
            *(str(row.args[name]) for name in names),
            f"{row.mean:.5g}" if row.scores else "",
            f"± {row.spread:.2g}" if len(row.scores) > 1 else "",
            str(row.steps),
            row.state + (f": {row.why}" if row.why else ""),
        ]
        for row in tuned.tried
    ]
    return ["trial", *names, tuned.metric, "spread", "steps", ""], rows
