"""One run over several tasks, each a host of its own: the same numbers, one voice, and nobody left behind."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests import forked
from tests.ranks import jobs
from tests.ranks.hosts.hosts import PLAIT, ROOT, ended, places, start_tasks

import plait
from plait.run.checkpoint.store import load_checkpoint
from plait.trace.files import read_trace

pytestmark = pytest.mark.timeout(150)

PLANS: tuple[tuple[str, int | None, dict[str, int] | None], ...] = (
    ("ddp", 4, None), ("zero3", 2, None), ("megatron", 2, None), ("1f1b", 2, None),
    ("megatron", None, {"data": 2, "tensor": 2}), ("server-sync", 4, None), ("local-sgd", 2, None),
)  # fmt: skip
"""Two tasks of up to two ranks each: the inner axis within hosts, the outer one between them."""


def prove() -> None:
    for plan, ranks, mesh in PLANS:
        found = plait.verify(jobs.plain(), plan, ranks, changes=plait.Changes(mesh=mesh or {}), steps=2)
        print(plan, found.ok, [difference.kind for difference in found.differences])


def test_plans_compute_over_two_hosts_what_one_process_computes(tmp_path: Path) -> None:
    tasks = [forked.forked(prove, place, cwd=tmp_path, start_new_session=True) for place in places(2)]
    (code, said, complaint), (other_code, _, other) = ended(tasks, timeout_s=140)
    assert (code, other_code) == (0, 0), complaint + other
    lines = said.splitlines()
    assert len(lines) == len(PLANS)
    assert all(" True ['loss', 'gradient', 'weight'" in line for line in lines), said


def run(tmp_path: Path, *more: str, job: str = "plain", sends: str = "0") -> list[subprocess.Popen[str]]:
    words: tuple[str | Path, ...] = (
        "run",
        jobs.reference(job),
        "--plan",
        "ddp",
        "--out",
        tmp_path / "run",
        *more,
    )
    return [
        forked.plait(*words, environment=place, cwd=ROOT, start_new_session=True)
        for place in places(2, PLAIT_SEND_FILES=sends)
    ]


def test_the_first_host_has_everything_and_one_voice(tmp_path: Path) -> None:
    """As without a shared disk: the others do not write to the folder of the first."""
    tasks = run(tmp_path, "--ranks", "4", "--steps", "4", "--checkpoint-every", "2", sends="1")
    (code, said, complaint), (other_code, other, silent) = ended(tasks, timeout_s=100)
    assert (code, other_code) == (0, 0), complaint + silent
    assert "run folder" in said and (other, silent) == ("", "")
    folder = tmp_path / "run"
    assert load_checkpoint(folder).step == 4
    assert {span.rank for span in read_trace(folder).spans} == {0, 1, 2, 3}
    assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 4
    hosts = json.loads((folder / "environment.json").read_text())["hosts"]
    assert [host["task"] for host in hosts] == [0, 1] and 0 < hosts[1]["clock_error_s"] < 1
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (["--set", "batch=12"], ["--set", "batch=24"], "has another batch than task 0: 24, not 12"),
        (["--ranks", "3"], ["--ranks", "3"], "3 ranks, which 2 tasks of PLAIT_TASK cannot share equally"),
        (["--ranks", "2"], ["--ranks", "3"], "3 ranks, which 2 tasks of PLAIT_TASK cannot share equally"),
        (
            ["--plan", "hogwild"],
            ["--plan", "hogwild"],
            "hogwild has one model in memory that all workers use",
        ),
    ],
)
def test_what_differs_between_hosts_is_told_once(
    first: list[str], second: list[str], told: str, tmp_path: Path
) -> None:
    """By task 0, before another one ends: engines end all tasks with the first that does."""
    command = [*PLAIT, "run", jobs.reference("plain"), "--plan", "ddp", "--out", str(tmp_path / "run")]
    tasks = start_tasks(command, 2, ROOT, differing=(first, second))
    try:
        tasks[1].wait(timeout=60)
    finally:
        tasks[0].kill()
    (_, _, complaint), (other_code, *others) = ended(tasks, timeout_s=60)
    assert told in complaint and complaint.count("Error: ") == 1, complaint
    assert other_code == 1 and others == ["", ""]
    assert not (tmp_path / "run").exists()


def _started(tasks: list[subprocess.Popen[str]], folder: Path) -> None:
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline and tasks[0].poll() is None
        time.sleep(0.05)


def _ranks_of(task: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{task.pid}/task/{task.pid}/children").read_text().split()
    return [int(pid) for pid in listed if b"-S\0-c" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _left(tasks: list[subprocess.Popen[str]]) -> list[str]:
    """Processes of the tasks' sessions that still live."""
    sessions, found = {task.pid for task in tasks}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in sessions and fields[0] not in "ZX":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize("victim", ["a rank", "a host", "the first host"])
def test_a_loss_ends_everybody_within_ten_seconds(tmp_path: Path, victim: str) -> None:
    tasks = run(tmp_path, "--steps", "100000", job="slow")
    try:
        _started(tasks, tmp_path / "run")
        pid = _ranks_of(tasks[1])[0] if victim == "a rank" else tasks[victim == "a host"].pid
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        (code, _, complaint), (_, _, other) = ended(tasks, timeout_s=30)
        assert time.monotonic() - began < 10
        if victim == "the first host":
            assert code == -signal.SIGKILL and "task 0 at 127.0.0.1" in other and "is gone" in other
        else:
            told = "was killed by SIGKILL" if victim == "a rank" else "is lost"
            assert code == 1 and "rank 1 of 2 on " in complaint and told in complaint
            assert other == ""
        deadline = time.monotonic() + 5
        while _left(tasks) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _left(tasks)
    finally:
        for task in tasks:
            if task.poll() is None:
                task.kill()


def test_a_signal_to_any_host_saves_and_ends_all(tmp_path: Path) -> None:
    tasks = run(tmp_path, "--steps", "100000", job="slow")
    _started(tasks, tmp_path / "run")
    tasks[1].send_signal(signal.SIGTERM)
    (code, _, complaint), (other_code, _, other) = ended(tasks, timeout_s=60)
    assert code == other_code == 130 and "interrupted and saved" in complaint and other == ""
    assert load_checkpoint(tmp_path / "run").step > 0
