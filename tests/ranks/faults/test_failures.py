"""Ranks that die, raise or hang: who is named, how soon, and that nothing is left; bad input is refused at once."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.ranks import jobs
from torch import Tensor, nn

import plait
from plait.errors import HangError, WorkerError
from plait.run.loop import rank
from plait.run.start.launch import Seat, connect
from plait.run.start.watch import hang

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("leaves_no_process")]


def test_complaint_10_a_killed_rank_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert jobs.cli("run", jobs.reference("killed"), "--ranks", "3", "--out", tmp_path / "run") == 1
    assert time.monotonic() - began < 60  # starting included; the next test times the end alone
    told = capsys.readouterr().err
    assert "was killed by SIGKILL" in told
    assert told.startswith("WorkerError: rank ")
    assert "Traceback" not in told
    assert told.count("rank ") == 1  # the others, who lost contact, are not told of
    assert "SIGKILL" in (tmp_path / "run" / "failure.txt").read_text()


def test_complaint_10_ranks_are_gone_soon_after_the_kill_and_what_is_saved_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    plait.train(jobs.plain(), ranks=1, out=run, saving=plait.Saving(trace=False))
    with pytest.raises(WorkerError) as caught:
        plait.resume(
            run, 2, plan="ddp", job=replace(jobs.killed(), epochs=2), saving=plait.Saving(trace=False)
        )
    assert caught.value.rank in (0, 1)
    assert f"Saved is step-00000004: plait run --resume {run} goes on from there." in str(caught.value)
    seen = (run / "failure.txt").stat().st_mtime
    assert time.time() - seen < 10


def test_complaint_10_an_exception_shows_the_traceback_of_its_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.cli("run", jobs.reference("raising_model"), "--ranks", "2", "--out", tmp_path / "run") == 1
    told = capsys.readouterr().err
    assert told.startswith("StepError: ") and "jobs.py:" in told  # the user's own line, not ours
    assert "ArithmeticError: the network met a huge number" in told
    assert "rank " in told and "samples " in told and "Fix: " in told
    kept = [path.read_text() for path in sorted((tmp_path / "run").glob("failed-rank-*.txt"))]
    assert any("Traceback" in text and "ArithmeticError" in text for text in kept)
    assert not any(
        "its own code failed: ConnectionError" in text for text in kept
    )  # an echo is nobody's line


def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("run", jobs.reference("broken_sample"), "--ranks", "2", "--out", tmp_path / "run") == 1
    told = capsys.readouterr().err
    assert "OSError: sample 42 is broken" in told
    assert "jobs.py:" in told
    assert "Traceback" not in told
    assert "Fix:" in told


def test_complaint_09_a_hang_is_reported_with_who_waits_for_whom(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(HangError) as caught:
        plait.train(jobs.hanging(), ranks=2, out=tmp_path / "run", limits=plait.Limits(hang_s=3))
    assert 3 < time.monotonic() - began < 60
    error = caught.value
    assert len(error.waiting) == len(error.missing) == 1
    assert {*error.waiting, *error.missing} == {0, 1}
    told = str(error)
    assert f"rank {error.missing[0]}" in told
    assert "_oversleep" in told  # the stack of the one who is missing
    assert "jobs.py" in told
    assert "wait" in told


class _StopsWhenBuilt(nn.Linear):
    def __init__(self, marker: Path, builder: int) -> None:
        super().__init__(16, 10)
        if os.getpid() != builder:  # not where it is captured
            jobs.stop_once(marker)


@pytest.mark.parametrize("phase", ["build", "train", "evaluate"])
def test_a_rank_that_is_stopped_is_named_in_every_phase(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_STOPPED_S", 3.0)  # and much time for one that is only slow, on a busy machine
    job, marker, parent = jobs.plain(), tmp_path / "stopped", os.getpid()
    if phase == "build":
        job = replace(job, model=lambda: _StopsWhenBuilt(marker, parent))
    elif phase == "train":
        job = replace(job, data=jobs.Marked(jobs.MARK, lambda: jobs.stop_once(marker)))
    else:
        job = replace(job, evaluate=lambda: jobs.Marked(7, lambda: jobs.stop_once(marker)))
    with pytest.raises(HangError, match="stack of rank") as caught:
        plait.train(job, ranks=2, out=tmp_path / "run", limits=plait.Limits(hang_s=60))
    assert len(caught.value.missing) == 1
    told = str(caught.value)
    assert "stopped by a signal" in told
    if phase == "evaluate":
        assert f"rank {1 - caught.value.missing[0]} waits in 'evaluate'" in told


@pytest.mark.parametrize("plan", ["hogwild", "easgd"])
def test_a_stopped_worker_of_a_plan_that_can_spare_it_is_told_and_left(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_STOPPED_S", 3.0)
    told: list[str] = []
    marker = tmp_path / "stopped"
    job = replace(jobs.plain(), data=jobs.Marked(jobs.MARK, lambda: jobs.stop_once(marker)))
    result = plait.train(
        job,
        plan,
        2 if plan == "hogwild" else 3,
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
        limits=plait.Limits(hang_s=60),
        watching=plait.Watching(listener=lambda event: told.append(str(event.get("notice", "")))),
    )
    assert len(result.losses) >= 3
    assert any("stopped by a signal" in notice and "go on" in notice for notice in told), told


@pytest.mark.parametrize("plan", ["hogwild", "server-async", "easgd"])
def test_a_worker_killed_before_it_has_connected_is_named_and_not_waited_for(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "victim"

    def die_or_connect(seat: Seat, *given: Any, **named: Any) -> None:
        if seat.rank == 1:
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        while not (note.exists() and (pid := note.read_text()) and not Path(f"/proc/{pid}").exists()):
            time.sleep(0.01)
        connect(seat, *given, **named)

    monkeypatch.setattr(rank, "connect", die_or_connect)
    ranks = 2 if plan == "hogwild" else 3
    with pytest.raises(
        WorkerError,
        match=rf"rank 1 of {ranks} was killed by SIGKILL \(before its first step, running 'connect'",
    ):
        plait.train(
            jobs.plain(),
            plan,
            ranks,
            out=tmp_path / "run",
            saving=plait.Saving(trace=False),
            limits=plait.Limits(hang_s=60),
        )


def test_complaint_09_the_command_exits_1_after_a_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (jobs.reference("hanging"), "--ranks", "2", "--hang-s", "2", "--out", tmp_path / "run")
    assert jobs.cli("run", *given) == 1
    assert capsys.readouterr().err.startswith("HangError: ")


def test_a_slow_step_is_no_hang(tmp_path: Path) -> None:
    """All ranks are slow together: nobody waits for longer than the limit."""
    job = replace(jobs.plain(), data=jobs.Marked(None, lambda: time.sleep(0.1)))
    assert len(plait.train(job, ranks=2, steps=2, out=tmp_path, limits=plait.Limits(hang_s=1.5)).losses) == 2


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_loss_that_is_not_a_number_ends_the_run(
    ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.cli("run", jobs.reference("diverging"), "--ranks", ranks, "--out", tmp_path / "run") == 1
    told = capsys.readouterr().err
    assert told.startswith("SpoiledError: the loss is ")
    assert "at step 2 (epoch 0)" in told
    assert "Fix: lower the learning rate" in told
    assert "Traceback" not in told


def test_weights_that_differ_between_ranks_are_noticed(tmp_path: Path) -> None:
    def unseeded() -> nn.Module:
        model = nn.Linear(16, 10)
        with torch.no_grad():
            model.bias.fill_(float(os.getpid()))
        return model

    with pytest.raises(plait.PlaitError, match="the initial weights of rank 1 and rank 0 differ"):
        plait.train(replace(jobs.plain(), model=unseeded), ranks=2, out=tmp_path)


def test_complaint_23_two_runs_at_once_need_no_flags(tmp_path: Path) -> None:
    """Same folder, same second: no port and no name of a run folder clashes."""
    processes = [
        forked.plait("run", jobs.reference("plain"), "--ranks", "2", cwd=tmp_path, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    for process in processes:
        out, _ = process.communicate()  # the test's own limit holds
        assert process.returncode == 0, out
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    texts = [(folder / "metrics.jsonl").read_text() for folder in folders]
    assert [text.count('"loss"') for text in texts] == [4, 4]


# --- refused before anything starts -------------------------------------------------------------------------

BAD_JOBS = """
from dataclasses import replace

import torch
from torch import nn

from tests.ranks.jobs import plain

not_a_job = 3

def number():
    return 3

def raising():
    raise ValueError("boom")

class Nothing(nn.Linear):
    def forward(self, x):
        super().forward(x)

class Raising(nn.Linear):
    def forward(self, x):
        raise ValueError("inside the model")

def no_tensor():
    return replace(plain(), model=lambda: Nothing(16, 10))

def model_raises():
    return replace(plain(), model=lambda: Raising(16, 10))

def wrong_shape():
    return replace(plain(), model=lambda: nn.Linear(7, 10))

def not_scalar():
    return replace(plain(), loss=nn.CrossEntropyLoss(reduction="none"))

def empty():
    return replace(plain(), data=[])

def no_evaluation_data():
    return replace(plain(), evaluate=[])

def no_optimizer():
    return replace(plain(), optimizer=lambda parameters: None)

def wrong_optimizer():
    return replace(plain(), optimizer=lambda parameters: torch.optim.SGD(parameters, rate=3))
"""

PLAIN = jobs.reference("plain")
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "missing file": (("missing.py",), "there is no file missing.py"),
    "missing module": (("no_such_module:job",), "there is no module no_such_module"),
    "no such function": (("bad.py:nothing",), "has no function 'nothing'"),
    "not a job": (("bad.py:number",), "returned the int 3, not a plait.Job"),
    "job raises": (("bad.py:raising",), "ValueError: boom"),
    "no tensor": (("bad.py:no_tensor",), "the model returned None, which holds no tensor"),
    "model raises": (("bad.py:model_raises",), "bad.py:23: ValueError: inside the model"),
    "wrong shape": (("bad.py:wrong_shape",), "shapes cannot be multiplied"),
    "loss not scalar": (("bad.py:not_scalar",), "neither a scalar tensor nor (total, weight)"),
    "no data": (("bad.py:empty",), "has 0 samples"),
    "no evaluation data": (("bad.py:no_evaluation_data",), "has 0 samples"),
    "no optimizer": (("bad.py:no_optimizer",), "optimizer"),
    "wrong optimizer": (("bad.py:wrong_optimizer",), "unexpected keyword argument 'rate'"),
    "no such plan": ((PLAIN, "--plan", "dpp"), "did you mean 'ddp'?"),
    "missing plan file": ((PLAIN, "--plan", "missing.yaml"), "missing.yaml cannot be read"),
    "no ranks": ((PLAIN, "--ranks", "0"), "ranks=0 is not a number of processes"),
    "single on two ranks": ((PLAIN, "--plan", "single", "--ranks", "2"), "2"),
    "batch < ranks": ((PLAIN, "--set", "batch=1"), "batch=1 is smaller than ranks=2"),
    "accumulate > batch": ((PLAIN, "--set", "accumulate=17"), "accumulate=17 is larger than batch=16"),
    "no batch": ((PLAIN, "--set", "batch=0"), "batch is 0"),
    "no steps": ((PLAIN, "--steps", "0"), "steps is 0"),
    "not a number": ((PLAIN, "--set", "batch=many"), "batch is 'many'"),
    "not a setting": ((PLAIN, "--set", "batches=3"), "there is no such setting"),
    "not a plan setting": ((PLAIN, "--set", "sync.bucket=3"), "no setting sync.bucket"),
    "not key=value": ((PLAIN, "--set", "batch"), "not KEY=VALUE"),
    "unreadable value": ((PLAIN, "--set", "batch=["), "is not YAML"),
    "folder in use": ((PLAIN, "--out", "used"), "used already holds a run"),
    "folder cannot be made": ((PLAIN, "--out", "bad.py/run"), "cannot be made"),
    "resume nothing": (("--resume", "nowhere"), "there is no run folder nowhere"),
    "no job": ((), "no job was given"),
    "unknown device": ((PLAIN, "--device", "tpu"), "'tpu' is not one of 'cpu', 'cuda'"),
    "no checkpoint interval": ((PLAIN, "--checkpoint-every", "0"), "checkpoint_every=0"),
    "unknown option": ((PLAIN, "--wrong"), "No such option: --wrong"),
    "not an integer": ((PLAIN, "--steps", "few"), "Invalid value for '--steps'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_complaint_08_bad_input_is_one_paragraph_before_any_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(BAD_JOBS)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "plait.run.parent.ranks.launch", lambda *_, **__: pytest.fail("a process was started")
    )
    arguments, told = REFUSED[name]
    ranks = () if "--ranks" in arguments else ("--ranks", "2")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert jobs.cli("run", *arguments, *ranks) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    if (
        "Error: No such" not in error and "Invalid value" not in error
    ):  # those come from the parser of options
        assert "\nFix: " in error
        assert error.count("\n") == 2
    left = {path.name for path in tmp_path.iterdir()} - {"runs", "__pycache__"}
    assert sorted(left) == before  # and no folder is left behind
    assert not list((tmp_path / "runs").iterdir() if (tmp_path / "runs").exists() else [])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("run", PLAIN, "--device", "cuda") == 2
    assert "built without it" in capsys.readouterr().err


def test_resuming_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert jobs.cli("run", PLAIN, "--resume", tmp_path) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err


def test_debug_shows_where_it_came_from() -> None:
    with pytest.raises(plait.PlaitError):
        jobs.cli("run", PLAIN, "--plan", "dpp", "--debug")


def test_an_uncapturable_model_that_fails_on_two_samples_is_told_of_early(tmp_path: Path) -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            if float(x.sum()) != 0:
                raise KeyError("temper")
            return self.inner(x)

    with pytest.raises(plait.PlaitError, match="KeyError: 'temper'") as caught:
        plait.train(replace(jobs.plain(), model=Moody), ranks=2, out=tmp_path / "run")
    assert "test_failures.py:" in str(caught.value)
