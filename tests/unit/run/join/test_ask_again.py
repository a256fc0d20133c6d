"""Task 0 of an elastic run is lost: who starts it again, and whether Slurm is asked to."""

from dataclasses import replace
from pathlib import Path

import pytest

from plait.run.join import slurm
from plait.run.join.find import ask_again, ask_again_after_fault
from plait.run.join.place import Place

JOB = {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_JOB_ID": "7",
    "PLAIT_REQUEUE": "1",
}  # fmt: skip


def _commands(folder: Path, state: str, status: int = 0) -> Path:
    """Slurm's own, which say so, and write down what they were asked."""
    asked = folder / "asked"
    for name, line in (("squeue", f"echo '{state}'"), ("scontrol", f"echo no such job >&2; exit {status}")):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {asked}\n{line}\n')
        (folder / name).chmod(0o755)
    return asked


def _place(environment: dict[str, str]) -> Place:
    found = slurm.read(environment)
    assert found is not None
    return found


def test_a_job_that_runs_is_requeued_and_another_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = _commands(tmp_path, "RUNNING|None")
    assert ask_again(_place(JOB), JOB) == "srun starts it"
    assert asked.read_text().splitlines()[1:] == ["scontrol requeue 7"]
    asked.unlink()
    _commands(tmp_path, "COMPLETING|None")  # cancelled, or another task was faster
    assert ask_again(_place(JOB), JOB) == "srun starts it"
    assert "requeue" not in asked.read_text()


@pytest.mark.parametrize("reason", ["JobLaunchFailure", "NonZeroExitCode", "RaisedSignal:9(Killed)"])
def test_a_job_that_ends_as_its_batch_script_was_killed_is_requeued(
    reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = _commands(tmp_path, f"COMPLETING|{reason}")
    assert ask_again(_place(JOB), JOB) == "srun starts it"
    assert asked.read_text().splitlines()[1:] == ["scontrol requeue 7"]


@pytest.mark.parametrize(
    ("state", "task", "asks"),
    [
        ("COMPLETING|JobLaunchFailure", "0", True),
        ("COMPLETING|JobLaunchFailure", "1", False),  # task 0 does
        ("COMPLETING|None", "0", False),  # cancelled, or requeued by Slurm itself
        ("RUNNING|None", "0", False),  # told before its limit: the batch script asks
    ],
)
def test_a_first_task_that_was_asked_to_end_looks_why(
    state: str, task: str, asks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = _commands(tmp_path, state)
    ask_again_after_fault(JOB | {"SLURM_PROCID": task})
    assert asks == (asked.exists() and "scontrol requeue 7" in asked.read_text())


def test_slurm_is_asked_again_where_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm, "_AGAIN_S", 0.0)
    asked = _commands(tmp_path, "RUNNING|None")
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\ntest -e {tmp_path}/tried && echo 'RUNNING|None' && exit\ntouch {tmp_path}/tried\nexit 1\n"
    )
    assert ask_again(_place(JOB), JOB) == "srun starts it"
    assert asked.read_text() == "scontrol requeue 7\n"


def test_who_cannot_be_asked_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm, "_TRIES_S", 0.0)
    _commands(tmp_path, "RUNNING|None", status=1)
    assert "scontrol: no such job): start it, by scontrol requeue 7," in ask_again(_place(JOB), JOB)
    by_hand = {name: value for name, value in JOB.items() if name != "PLAIT_REQUEUE"}
    assert ask_again(_place(by_hand), by_hand) == "start it by the same command"
    assert ask_again(replace(_place(JOB), engine="torchrun"), {}) == "torchrun starts it"
