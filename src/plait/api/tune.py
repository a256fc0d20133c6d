"""Try a job with several arguments, on folds of its data, side by side: everything that `plait try` does but show it.

In: a job that is named, and what its arguments may be. Out: a `Tuned`, and a folder with a run folder for each trial
and fold, results.jsonl, and a page. The same call goes on with what is in that folder.
"""

import hashlib
import json
import math
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from plait.api.given import given_job, name_of
from plait.api.settings import write_arguments, write_settings
from plait.api.train import AUTO
from plait.api.trials.board import REDUCTION, Board, Key
from plait.api.trials.runs import Running, interrupt, outcome_of, start
from plait.api.trials.space import proposer, read_space
from plait.api.trust import anywhere, fingerprint
from plait.errors import UsageError
from plait.files.write import write_whole
from plait.job.data.open import open_data
from plait.job.generators import kept_generators
from plait.options import Listener
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.report.record import read_run
from plait.report.tries_page import Curve, tries_page
from plait.run.record.evaluate import aim_of
from plait.run.record.lock import locked

Searching = Literal["grid", "random", "optuna", "asha"]
"""How the arguments of trials are chosen."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What is tried, and how its runs are started."""

    job: str
    plan: str | None
    ranks: int | None
    mesh: Mapping[str, int]
    settings: Mapping[str, Any]
    steps: int | None
    device: str
    folds: int
    seed: int
    args: Mapping[str, Any] = field(default_factory=dict)

    def command(self, args: Mapping[str, Any]) -> list[str]:
        """The arguments of `plait run` for these arguments of the job, on all of the data."""
        words = [self.job, *(word for entry in write_arguments(args) for word in ("--arg", entry))]
        words += ["--plan", self.plan] if self.plan is not None else []
        words += ["--ranks", str(self.ranks)] if self.ranks is not None else []
        words += (
            ["--mesh", ",".join(f"{name}={size}" for name, size in self.mesh.items())] if self.mesh else []
        )
        words += [word for entry in write_settings(self.settings) for word in ("--set", entry)]
        return words + (["--device", self.device] if self.device != "cpu" else [])

    def fold(self, fold: int) -> dict[str, str]:
        """The setting that holds out a part."""
        return {"fold": f"{fold + 1}/{self.folds}:{self.seed}"} if self.folds > 1 else {}

    def total_steps(self, args: Mapping[str, Any]) -> int:
        """Of a whole trial."""
        if self.steps is not None:
            return self.steps
        job, _ = given_job(self.job, {**self.settings, **self.fold(0)}, args)
        total = job.total_steps(open_data(job.data, job.collate).num_samples)
        if total is None:
            raise UsageError(
                "--search asha: a stream does not say how many steps there are.", fix="give --steps."
            )
        return total


@kept_generators()
def tune(
    job: str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    args: Mapping[str, Any],
    mesh: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    folds: int = 1,
    search: Searching = "grid",
    trials: int = 20,
    metric: str = "loss",
    seed: int = 0,
    steps: int | None = None,
    parallel: int | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    listener: Listener | None = None,
) -> Tuned:
    """Train `job` with several arguments and compare its last evaluations; the same call goes on after a kill.

    `args` is what may be tried: {"lr": [1e-4, 3e-4], "width": "64:256", "wd": "1e-5:1e-1:log"}, as on the command line.
    With `folds` each trial is trained so many times, each time on all but one part of the data, and evaluated on that
    part; without, on the job's own `evaluate`. `search`: every combination (`grid`), at random, by `optuna`, or `asha`,
    at random where losers are stopped early. `parallel` trials run side by side, as many as fit by default.
    """
    _check(search, folds, trials, parallel)
    space = read_space(args)
    folder = Path(out) if out is not None else None
    if isinstance(plan, Plan):
        raise UsageError(
            "tune starts runs that are told their plan by name.", fix="give a name, or a .yaml file."
        )
    request = _Request(
        job=anywhere(job), plan=None if plan is None else str(plan), ranks=ranks, mesh=mesh or {},
        settings=settings or {}, steps=steps, device=device, folds=folds, seed=seed, args=args,
    )  # fmt: skip
    first = proposer("random", space, 1, seed, "min")(0, {}, {})
    assert first is not None
    given, of_plan = given_job(request.job, {**request.settings, **request.fold(0)}, first)
    if given.evaluate is None:
        raise UsageError(
            "the job has no evaluation data to compare trials by.",
            fix="give Job(evaluate=...), or --folds 5.",
        )
    aim = aim_of(metric, given, "--metric")
    chosen = 0 if plan == AUTO else resolve(plan, ranks, of_plan, mesh).ranks
    folder = _claim(folder, request, search, metric)
    rungs = _RUNGS if search == "asha" else 1
    places = _places(device, chosen, parallel)
    with locked(folder):
        board = Board(
            folder / "results.jsonl", folds=folds, rungs=rungs, mode=aim.mode,
            propose=proposer(search, space, trials, seed, aim.mode),
        )  # fmt: skip
        try:
            _work(board, request, folder, aim.metric, rungs, places, listener or (lambda event: None))
        finally:
            board.close()
        tuned = _tuned(board, request, folder, aim.metric, aim.mode, rungs)
        write_whole(folder / "try.html", _page(tuned, name_of(job), folds))
    return tuned


def _check(search: str, folds: int, trials: int, parallel: int | None) -> None:
    if search not in get_args(Searching):
        raise UsageError(
            f"--search {search} is not known.", fix=f"use one of {', '.join(get_args(Searching))}."
        )
    for name, value in (("folds", folds), ("trials", trials), ("parallel", parallel)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value} leaves nothing to run.", fix="use 1 or more.")


def _claim(folder: Path | None, request: _Request, search: str, metric: str) -> Path:
    """The folder of this try, which holds no other: the same request has the same one."""
    said = {
        "job": request.job, "args": {name: str(value) for name, value in request.args.items()}, "plan": request.plan,
        "ranks": request.ranks, "mesh": dict(request.mesh), "settings": write_settings(request.settings),
        "steps": request.steps, "device": request.device, "folds": request.folds, "seed": request.seed,
        "search": search, "metric": metric, **fingerprint(request.job),
    }  # fmt: skip
    text = json.dumps(said, indent=2) + "\n"
    if folder is None:
        folder = Path("tries") / f"{name_of(request.job)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    path = folder / "try.json"
    if path.exists():
        before = json.loads(path.read_text())
        changed = [name for name in said if before.get(name) != said[name]]
        if changed:
            raise UsageError(
                f"{folder} holds another try: {', '.join(changed)} changed since.",
                fix="choose another --out.",
            )
    elif folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is no folder of a try.", fix="choose a new folder.")
    else:
        write_whole(path, text)
    return folder


def _places(device: str, ranks: int, parallel: int | None) -> list[dict[str, str]]:
    """Places for runs on this machine, each with variables of its own; `ranks` 0: a run takes all."""
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = parallel or (max(1, cores // ranks) if ranks else 1)
        threads = str(max(1, cores // (count * max(ranks, 1))))
        return [{} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}] * count
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
    ranks = ranks or len(devices)
    fit = max(1, len(devices) // max(ranks, 1))
    groups = [devices[place % fit * ranks :][:ranks] for place in range(parallel or fit)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def _work(
    board: Board,
    request: _Request,
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
                steps = request.steps
                if rungs > 1:
                    steps = max(
                        1, request.total_steps(board.args[key.trial]) // REDUCTION ** (rungs - 1 - key.rung)
                    )
                place = free.pop(0)
                words = request.command(board.args[key.trial])
                words += [
                    word for entry in write_settings(request.fold(key.fold)) for word in ("--set", entry)
                ]
                running[key] = start(words, _folder(folder, request, key), place, places[place], steps)
            if not running:
                return
            for key, run in list(running.items()):
                if (code := run.poll()) is not None:
                    del running[key]
                    run.task.close()
                    board.take(key, outcome_of(run, code, metric))
                    listener({"told": _line(board, request, key, metric)})


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


def _folder(folder: Path, request: _Request, key: Key) -> Path:
    part = f"-fold{key.fold + 1}" if request.folds > 1 else ""
    return folder.absolute() / "trials" / f"{key.trial:03d}{part}"


def _line(board: Board, request: _Request, key: Key, metric: str) -> str:
    outcome, part = board.outcomes[key], f" fold {key.fold + 1}/{request.folds}" if request.folds > 1 else ""
    what = f"{metric} {outcome.score:.5g}" if outcome.score is not None else f"failed: {outcome.failed}"
    named = " ".join(write_arguments(board.args[key.trial]))
    return f"trial {key.trial}{part} ({named}): {what}, {outcome.steps} steps in {outcome.seconds:.1f} s"


def _tuned(board: Board, request: _Request, folder: Path, metric: str, mode: str, rungs: int) -> Tuned:
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
