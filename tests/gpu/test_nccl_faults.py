"""Runs over NCCL that are disturbed: ranks killed or stopped within collectives, hangs, checkpoints under another plan.

Ranks share one GPU (`tests/gpu/test_nccl.py`). Each run is a fresh interpreter: one that has used CUDA cannot fork.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from os import environ, kill
from pathlib import Path

import pytest
from tests.ranks import jobs

from plait.report.record import read_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]

NCCL = ("--device", "cuda", "--set", "links.transport=nccl")
GONE_S = 10.0
"""What is promised: all gone within so many seconds."""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Runs of a test, ended with it."""
    runs: list[subprocess.Popen[str]] = []
    yield runs
    for run in runs:
        run.kill()
        run.wait()
        assert run.stdout is not None
        run.stdout.close()


def begin(started: list[subprocess.Popen[str]], *words: str | Path) -> subprocess.Popen[str]:
    """`plait run WORDS`."""
    run = subprocess.Popen(
        [sys.executable, "-m", "plait", "run", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    started.append(run)
    return run


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they started, the oldest first."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found: list[int] = []
    todo = [pid]
    while todo:
        children = sorted(child for child, parent in parents.items() if parent == todo[0])
        found, todo = found + children, todo[1:] + children
    return found


def ranks_of(run: subprocess.Popen[str], count: int) -> list[int]:
    """Those of its processes that have the device open."""

    def uses_device(pid: int) -> bool:
        try:
            return any("/dev/nvidia" in str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return False

    found = [pid for pid in descendants(run.pid) if uses_device(pid)]
    assert len(found) >= count, (found, run.poll())
    return found


def wait_for_step(folder: Path, step: int, run: subprocess.Popen[str]) -> None:
    """Until the checkpoint of a step, or a later one, is there."""
    while not any(int(path.name.split("-")[1]) >= step for path in folder.glob("checkpoints/step-????????")):
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)


def ended(run: subprocess.Popen[str], processes: list[int], within_s: float) -> str:
    """What a run said that must end within some seconds, with none of its processes left."""
    text, _ = run.communicate(timeout=within_s)
    left = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not left, text
    return text


@pytest.mark.parametrize("plan", ["ddp", "zero3", "1f1b", "megatron", "local-sgd"])
def test_a_killed_rank_ends_the_run(plan: str, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    folder = tmp_path / "run"
    run = begin(
        started, jobs.reference("slow"), "--plan", plan, "--ranks", "2", "--steps", "100000", "--out", folder,
        "--checkpoint-every", "20", *NCCL,
    )  # fmt: skip
    wait_for_step(folder, 20, run)
    processes = descendants(run.pid)
    victim = ranks_of(run, 2)[-1]
    kill(victim, signal.SIGKILL)
    text = ended(run, processes, GONE_S)
    assert run.returncode == 1
    assert "was killed by SIGKILL" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("plan", ["ddp", "1f1b"])
def test_a_stopped_rank_is_told(plan: str, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    folder, hang_s = tmp_path / "run", 5
    run = begin(
        started, jobs.reference("slow"), "--plan", plan, "--ranks", "2", "--steps", "100000", "--out", folder,
        "--checkpoint-every", "20", "--hang-s", str(hang_s), *NCCL,
    )  # fmt: skip
    wait_for_step(folder, 20, run)
    processes = descendants(run.pid)
    kill(ranks_of(run, 2)[-1], signal.SIGSTOP)
    text = ended(run, processes, 2 * hang_s + GONE_S)  # twice, where the host has run ahead of its device
    assert run.returncode == 1
    assert "rank" in text and ("does not move" in text or "is missing" in text), text


def test_a_rank_that_never_comes_to_a_collective_is_told(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    run = begin(
        started, jobs.reference("hanging"), "--plan", "ddp", "--ranks", "2", "--out", tmp_path / "run",
        "--hang-s", "5", *NCCL,
    )  # fmt: skip
    text, _ = run.communicate(timeout=90)
    assert run.returncode == 1
    assert "_oversleep" in text and "is missing" in text, text


def test_a_checkpoint_over_nccl_is_resumed_under_another_plan(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    undisturbed, folder = tmp_path / "one", tmp_path / "run"
    runs = [
        (
            jobs.reference("dropout"),
            "--plan",
            "single",
            "--device",
            "cuda",
            "--steps",
            "14",
            "--out",
            undisturbed,
        ),
        (
            jobs.reference("dropout"),
            "--plan",
            "zero3",
            "--ranks",
            "2",
            "--steps",
            "5",
            "--out",
            folder,
            *NCCL,
        ),
        ("--resume", folder, "--plan", "1f1b", "--ranks", "2", "--steps", "10", *NCCL),
        ("--resume", folder, "--plan", "ddp", "--ranks", "4", "--steps", "14", *NCCL),
    ]
    for words in runs:
        run = begin(started, *words)
        text, _ = run.communicate()
        assert run.returncode == 0, text
    expected, losses = ([m["loss"] for m in read_run(name).metrics] for name in (undisturbed, folder))
    assert len(losses) == 14
    assert losses == pytest.approx(expected, rel=1e-3)  # AdamW enlarges what sums round
