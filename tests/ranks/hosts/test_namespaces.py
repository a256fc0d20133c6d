"""Two hosts with networks of their own: one loses its power, one has a rank that does not move, and strangers call."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ranks import jobs
from tests.ranks.hosts.hosts import PLAIT, ROOT, Namespace, ended, environment, namespaces

from plait.run.checkpoint.store import load_checkpoint

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root makes networks"),
]

_NOBODY = 65534
_TOLD_S = 10.0 + 10.0
"""What is promised; and as much again, for a machine that is busy."""


@pytest.fixture(scope="module")
def spaces() -> Iterator[list[Namespace]]:
    """Two hosts and a stranger."""
    try:
        made = namespaces(3)
        found = made.__enter__()
    except OSError as error:
        pytest.skip(f"needs network namespaces (apt-get install iproute2): {error}")
    yield found
    made.__exit__(None, None, None)


def start(spaces: list[Namespace], out: Path, *more: str, job: str = "slow") -> "list[subprocess.Popen[str]]":
    shared = {
        "PLAIT_TASKS": "2", "PLAIT_FIRST_ADDRESS": spaces[0].address, "PLAIT_RUN_ID": uuid.uuid4().hex,
        "PLAIT_TOKEN": uuid.uuid4().hex,
    }  # fmt: skip
    run = [
        *PLAIT,
        "run",
        jobs.reference(job),
        "--plan",
        "ddp",
        "--ranks",
        "2",
        "--no-trace",
        "--out",
        str(out),
    ]
    tasks = [
        subprocess.Popen(
            space.command([*run, *more]), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment(**shared, PLAIT_TASK=str(task), PLAIT_HOST=space.name, PLAIT_SEND_FILES="1"),
        )
        for task, space in enumerate(spaces[:2])
    ]  # fmt: skip
    while not (out / "metrics.jsonl").exists() or '"step": 3,' not in (out / "metrics.jsonl").read_text():
        assert tasks[0].poll() is None, tasks[0].communicate()
        time.sleep(0.05)
    return tasks


STRANGER = """
import encodings.idna, os, socket, sys, time
address, ports = sys.argv[1], [int(port) for port in sys.argv[2].split(",")]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
heard, held = set(), []
for port in ports:
    for said in (b"", b"plait/1\\n" + bytes(64), b"GET / HTTP/1.0\\r\\n\\r\\n", bytes(1 << 16)):
        made = socket.create_connection((address, port), timeout=10)
        made.sendall(said)
        if said:
            try:
                while piece := made.recv(1 << 16):
                    heard.add(len(piece))
            except OSError:
                pass
            made.close()
        else:
            held.append(made)
    for _ in range(300):
        held.append(socket.create_connection((address, port), timeout=10))
print("heard", sorted(heard))
sys.stdout.flush()
time.sleep(600)
"""
"""As nobody: say nothing, garbage and a false proof at every door, and hold 300 connections to each."""


def _listening(space: Namespace) -> list[tuple[str, int]]:
    told = subprocess.run(
        space.command(["cat", "/proc/net/tcp"]), capture_output=True, text=True, check=True
    ).stdout
    found = []
    for line in told.splitlines()[1:]:
        where, state = line.split()[1], line.split()[3]
        if state == "0A":
            host, port = where.split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def test_strangers_on_the_network_and_on_a_host_change_nothing(
    spaces: list[Namespace], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    tasks = start(spaces, out, "--steps", "100000")
    doors = [(space, _listening(space)) for space in spaces[:2]]
    assert all(found and {where for where, _ in found} == {space.address} for space, found in doors), doors
    strangers = []
    try:
        for space, found in doors:
            ports = ",".join(str(port) for _, port in found)
            for place in (spaces[2], space):
                command = [sys.executable, "-S", "-c", STRANGER, space.address, ports]
                strangers.append(
                    subprocess.Popen(
                        place.command(command), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        env=environment(),
                    )
                )  # fmt: skip
        said = [stranger.stdout.readline() for stranger in strangers if stranger.stdout is not None]
        lines = (out / "metrics.jsonl").read_text().count("\n")
        while (out / "metrics.jsonl").read_text().count("\n") < lines + 5:  # it goes on beside them
            assert tasks[0].poll() is None, tasks[0].communicate()
            time.sleep(0.05)
        tasks[0].send_signal(signal.SIGTERM)
        (code, _, complaint), (other_code, _, other) = ended(tasks, timeout_s=60)
    finally:
        for stranger in strangers:
            stranger.kill()
        complaints = [stranger.communicate()[1] for stranger in strangers]
    assert said == ["heard [40]\n"] * 4, (said, complaints)  # a fresh number and nothing else
    assert (code, other_code) == (130, 130), complaint + other
    assert load_checkpoint(out).step > 0


def test_a_rank_that_does_not_move_is_told_with_its_host_and_what_others_wait_in(
    spaces: list[Namespace], tmp_path: Path
) -> None:
    tasks = start(spaces, tmp_path / "run", "--hang-s", "5", "--steps", "100000")
    listed = Path(f"/proc/{tasks[1].pid}/task/{tasks[1].pid}/children").read_text().split()
    ranks = [pid for pid in listed if b"-S\0-c" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(ranks[0]), signal.SIGSTOP)
    (code, _, complaint), (_, _, other) = ended(tasks, timeout_s=60)
    assert code == 1 and other == ""
    assert f"rank 1 on {socket.gethostname()}" in complaint and "rank 0 waits in 'wait for " in complaint, (
        complaint
    )


def test_nobody_waits_for_a_host_that_is_stopped(spaces: list[Namespace], tmp_path: Path) -> None:
    """Its kernel acknowledges what is sent; none of its processes moves: no stack, no file and no end comes of it."""
    tasks = start(spaces, tmp_path / "run", "--hang-s", "5", "--steps", "100000")
    below = Path(f"/proc/{tasks[1].pid}/task/{tasks[1].pid}/children").read_text().split()
    stopped = [tasks[1].pid, *map(int, below)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        _, complaint = tasks[0].communicate(timeout=60)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    (_, _, other) = ended(tasks[1:], timeout_s=60)[0]  # and it ends when it is woken
    assert tasks[0].returncode == 1 and "rank 1 is missing" in complaint, complaint
    assert f"rank 1: nothing is heard of its host {socket.gethostname()} any more." in complaint, complaint
    assert "task 0" in other


def test_a_host_without_power_is_told_and_ends_everybody(spaces: list[Namespace], tmp_path: Path) -> None:
    """The last one of this file: its network is not plugged in again. No connection is closed."""
    tasks = start(spaces, tmp_path / "run", "--steps", "100000")
    spaces[1].unplug()
    began = time.monotonic()
    (code, _, complaint), (other_code, _, other) = ended(tasks, timeout_s=60)
    assert time.monotonic() - began < _TOLD_S
    assert code == 1 and "rank 1 of 2" in complaint and "does not answer" in complaint, complaint
    assert other_code != 0 and "task 0" in other
