"""What is tried, in which order, what is stopped, and that a try goes on where it was."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.api.trials import runs
from plait.api.trials.board import Board, Key, Outcome
from plait.api.trials.space import Range, as_taken, drawn, grid, proposer, read_space
from plait.cli.main import call
from plait.errors import UsageError

JOB = """
import torch
from torch import nn
import plait

SAMPLES = 20

class Rows(nn.Module):  # a weight for every sample: those that were trained on have moved
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(SAMPLES))
        self.shared = nn.Parameter(torch.zeros(()))

    def forward(self, index):
        return self.rows[index] + self.shared

def job(lr: float = 0.1, kind="sgd"):
    if kind == "none":
        raise ValueError("there is no such optimizer")
    data = (torch.arange(SAMPLES), torch.ones(SAMPLES))
    return plait.Job(model=Rows, data=data, loss=nn.MSELoss(), batch=5, epochs=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=lr))

def evaluated(lr: float = 0.1):
    from dataclasses import replace
    return replace(job(lr), evaluate=job().data, steps=9, epochs=None, evaluate_every=1,
        metrics={"height": lambda o, t: o.mean()})
"""


class Here:
    """A run in this process, at once."""

    started: list[Sequence[str]]

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], shipped: None, cwd: str) -> None:
        self.started.append(words)
        self.code = call(list(words))

    def read(self, patience_s: float) -> tuple[bytes, int]:
        return b"ValueError: there is no such optimizer\n" if self.code else b"", self.code

    def close(self) -> None:
        pass


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "HostTask", Here)
    monkeypatch.setattr(Here, "started", [], raising=False)
    (tmp_path / "rows.py").write_text(JOB)
    return str(tmp_path / "rows.py")


def test_what_people_write_for_arguments() -> None:
    space = read_space(
        {"lr": "1e-4,3e-4", "width": "64:256", "wd": "1e-5:1e-1:log", "tag": "a:b", "n": [1, 2], "k": 3}
    )
    assert (
        space["lr"] == ("1e-4", "3e-4")
        and space["tag"] == ("a:b",)
        and space["n"] == (1, 2)
        and space["k"] == (3,)
    )
    width = Range(low=64, high=256, is_whole=True, is_log=False)
    assert space["width"] == width
    assert len(grid(space)) == 2 * 3 * 3 * 2
    assert {args["width"] for args in grid(space)} == {64, 160, 256}
    assert sorted({args["wd"] for args in grid(space)}) == [1e-5, 1e-3, 1e-1]
    assert as_taken(space, dict.fromkeys(space, 1.0))["width"] == replace(width, is_whole=False)
    assert as_taken(space, dict.fromkeys(space, 1)) == space
    for text in ("3:1", "0:1:log"):
        with pytest.raises(UsageError, match="is no range"):
            read_space({"lr": text})


def test_random_arguments_follow_from_the_seed_and_none_comes_twice() -> None:
    space = read_space({"lr": "1e-5:1:log", "width": "1:4"})
    some = drawn(space, 12, seed=0)
    assert drawn(space, 20, seed=0)[:12] == some != drawn(space, 12, seed=1)
    assert all(1e-5 <= args["lr"] <= 1 and args["width"] in (1, 2, 3, 4) for args in some)
    assert sum(args["lr"] < 1e-3 for args in some) >= 3, "small ones are as likely as large ones"
    finite = read_space({"lr": "1,2,3", "kind": "a,b"})
    assert len({json.dumps(args) for args in drawn(finite, 50, seed=0)}) == 6


def test_optuna_learns_from_the_trials_before() -> None:
    space = read_space({"x": "0.0:1.0", "kind": "a,b"})
    propose = proposer("optuna", space, 31, 0, "max")
    args: dict[int, dict[str, Any]] = {}
    scores: dict[int, float] = {}
    for number in range(31):
        found = propose(number, scores, args)
        assert found is not None
        args[number], scores[number] = found, -abs(found["x"] - 0.3) - (found["kind"] == "a")
    assert propose(31, scores, args) is None
    late = [args[number] for number in range(20, 31)]
    assert sum(one["kind"] == "b" and abs(one["x"] - 0.3) < 0.25 for one in late) >= 7
    assert propose(30, {k: v for k, v in scores.items() if k < 30}, args) == args[30], "and from nothing else"


def board(path: Path, trials: int, *, rungs: int = 3, folds: int = 1) -> Board:
    planned = [{"x": number} for number in range(trials)]
    return Board(
        path, folds=folds, rungs=rungs, mode="min",
        propose=lambda number, scores, args: planned[number] if number < trials else None,
    )  # fmt: skip


def work(found: Board, places: int = 2, most: int = 1000) -> list[Key]:
    """Run everything; the score of a trial is its distance from 4."""
    done: list[Key] = []
    while len(done) < most:
        while len(found.running) < places and found.next() is not None:
            pass
        if not found.running:
            break
        key = min(found.running)
        found.take(key, Outcome(score=abs(found.args[key.trial]["x"] - 4.0), steps=1))
        done.append(key)
    return done


def test_only_the_best_go_on_to_more_steps(tmp_path: Path) -> None:
    found = board(tmp_path / "results.jsonl", 9)
    done = work(found)
    at = [[key.trial for key in done if key.rung == rung] for rung in range(3)]
    assert sorted(at[0]) == list(range(9)) and 3 <= len(at[1]) <= 6 and 1 <= len(at[2]) <= 3
    assert 4 in at[2], "the best has gone all the way"
    assert all(trial in at[0] and trial in at[1] for trial in at[2])


def test_somebody_finishes_however_few_there_are(tmp_path: Path) -> None:
    found = board(tmp_path / "results.jsonl", 2)
    assert [(key.trial, key.rung) for key in work(found)] == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_a_board_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = work(board(tmp_path / "whole.jsonl", 9, folds=2))
    first = work(board(tmp_path / "parts.jsonl", 9, folds=2), most=7)
    with (tmp_path / "parts.jsonl").open("a") as file:
        file.write('{"trial": 3, "ru')  # killed while it wrote
    second = work(board(tmp_path / "parts.jsonl", 9, folds=2))
    assert not set(first) & set(second), "nothing is run twice"
    assert {key for key in whole if key.rung == 0} == {key for key in [*first, *second] if key.rung == 0}


def test_folds_of_a_trial_that_failed_are_not_run(tmp_path: Path) -> None:
    found = board(tmp_path / "results.jsonl", 2, rungs=1, folds=3)
    first = found.next()
    assert first == Key(0, 0, 0)
    found.take(first, Outcome(failed="no"))
    assert found.next() == Key(1, 0, 0)
    assert found.failed(0) == "no" and found.mean(0, 0) is None


def test_where_all_fail_alike_no_more_are_run(tmp_path: Path) -> None:
    """Unless what they fail for may be an argument that all of them have."""
    values = iter([{"lr": rate, "kind": kind} for kind in "ab" for rate in (1, 2, 3)])
    found = Board(
        tmp_path / "results.jsonl", folds=1, rungs=1, mode="min", propose=lambda *_: next(values, None),
        varied=["lr", "kind"],
    )  # fmt: skip
    run = []
    while (key := found.next()) is not None:
        run.append(key.trial)
        found.take(key, Outcome(failed="no such file"))
    assert run == [0, 1, 2, 3] and found.hopeless == "no such file"


def test_a_grid_on_folds_names_the_best_and_trains_no_fold_on_its_own_part(path: str, tmp_path: Path) -> None:
    arguments = ["try", path, "--arg", "lr=0.01,1", "--arg", "kind=sgd,none", "--folds", "2", "--out", "try"]
    assert call(arguments) == 0
    tuned = plait.tune(
        path,
        changes=plait.Changes(args={"lr": "0.01,1", "kind": "sgd,none"}),
        tries=plait.Tries(folds=2),
        out="try",
    )
    assert [(row.args["lr"], row.args["kind"], row.state) for row in tuned.tried[:2]] == [
        ("1", "sgd", "finished"),
        ("0.01", "sgd", "finished"),
    ]
    assert {row.state for row in tuned.tried[2:]} == {"failed"} and "no such optimizer" in str(
        tuned.tried[2].why
    )
    assert tuned.best is not None and len(tuned.best.scores) == 2
    assert tuned.command == f"plait run {path} --arg lr=1 --arg kind=sgd"
    held: list[int] = []
    for fold in (1, 2):
        record = plait.read_run(tmp_path / "try" / "trials" / f"000-fold{fold}")
        assert f'fold="{fold}/2:0"' in record.environment["settings"]
        weights = plait.resume(record.folder, saving=plait.Saving(trace=False)).weights["rows"]
        held += (weights == 0).nonzero().flatten().tolist()
    assert sorted(held) == list(range(20)), (
        "each sample was held out once, and moved by training on the other fold"
    )
    page = (tmp_path / "try" / "try.html").read_text()
    assert "plait try rows" in page and "--arg lr=1" in page and "<svg" in page
    with pytest.raises(UsageError, match="holds another try: args, folds changed"):
        plait.tune(path, changes=plait.Changes(args={"lr": "0.01,2"}), tries=plait.Tries(folds=3), out="try")


def test_losers_are_stopped_and_the_best_goes_on_from_its_checkpoint(path: str) -> None:
    tuned = plait.tune(
        f"{path}:evaluated",
        changes=plait.Changes(args={"lr": [0.001, 0.01, 0.5]}),
        tries=plait.Tries(search="asha", metric="height", trials=3, parallel=1),
    )
    assert [(row.args["lr"], row.steps, row.state) for row in tuned.tried] == [
        (0.5, 9, "finished"),
        (0.01, 1, "stopped"),
        (0.001, 1, "stopped"),
    ]
    assert tuned.best is not None
    lines = plait.read_run(tuned.folder / "trials" / f"{tuned.best.trial:03d}").metrics
    assert [line["step"] for line in lines] == list(range(9)), "each step once"
    assert sum("--resume" in words for words in Here.started) == 2 and len(Here.started) == 5


def test_arguments_with_which_the_job_fails_lose(path: str) -> None:
    tuned = plait.tune(
        path,
        changes=plait.Changes(args={"kind": "none,sgd"}),
        tries=plait.Tries(folds=2, search="asha"),
        steps=None,
    )
    assert [(row.args["kind"], row.state) for row in tuned.tried] == [("sgd", "finished"), ("none", "failed")]
    with pytest.raises(plait.PlaitError, match="no such optimizer"):
        plait.tune(path, changes=plait.Changes(args={"kind": "none"}), tries=plait.Tries(folds=2))


def test_what_cannot_be_tried_is_told_before_anything_runs(path: str) -> None:
    twice = plait.Tries(folds=2)
    for told, options in (
        ("no evaluation data", {}),
        ("by name", {"job": plait.load_job(path)}),
        ("--metric accuracy is not a metric", {"tries": plait.Tries(folds=2, metric="accuracy")}),
        ("takes float, not 'fast'", {"changes": plait.Changes(args={"lr": "0.1,fast"}), "tries": twice}),
        ("has no such parameter", {"changes": plait.Changes(args={"width": "1,2"}), "tries": twice}),
    ):
        with pytest.raises(UsageError, match=told):
            plait.tune(**{"job": path, "changes": plait.Changes(args={"lr": "0.1,1"}), **options})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--search best is not known"):
        plait.Tries(search="best")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--folds 0 leaves nothing"):
        plait.Tries(folds=0)
    assert not Here.started and call(["try", path]) == 2


def test_an_engine_starts_each_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Here):
        def __init__(self, words: Sequence[str], *others: object) -> None:
            self.started.append(words)
            self.code = 1

    monkeypatch.setattr(runs, "HostTask", Elsewhere)
    options = ["--engine", "slurm", "--hosts", "2", "--ranks", "4", "--engine-set", "time=1:00:00"]
    assert call(["try", path, "--arg", "lr=1,2", "--folds", "2", *options]) == 1, "all failed"
    assert len(Here.started) == 2, "one fold of each"
    assert all(" ".join(words).endswith(" ".join(options)) for words in Here.started)


def test_the_same_command_goes_on_after_a_kill(tmp_path: Path, path: str) -> None:
    words = [
        "try",
        f"{path}:evaluated",
        "--arg",
        "lr=0.01,1",
        "--parallel",
        "1",
        "--out",
        str(tmp_path / "try"),
    ]
    start = [sys.executable, "-c", "from plait.cli.main import main; main()", *words]
    results = tmp_path / "try" / "results.jsonl"
    with subprocess.Popen(start, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        deadline_s = time.monotonic() + 100
        while time.monotonic() < deadline_s and not (results.exists() and "score" in results.read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert call(words) == 0
    assert len(Here.started) == 1, "the first was not run again"
    assert sum("score" in line for line in results.read_text().splitlines()) == 2
