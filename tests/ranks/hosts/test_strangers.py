"""Another user of this host, who knows all about a run, joins, reads, injects and stalls nothing: tried."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import jobs

import plait
from plait.files.holder import is_alive
from plait.run.start.launch import Seat, connect, disconnect, launch

_NOBODY = 65534

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="only root can act as another user"
    ),
]

_PTRACE_ATTACH = 16
_PIDFD_GETFD = 438
_DESCRIPTORS = 128
"""Of a process that are tried: more than a rank has."""


def _attempts(pids: list[int]) -> list[str]:
    """What of these processes this user can read, write, stop or take part in."""
    done: list[str] = []
    libc = ctypes.CDLL(None, use_errno=True)

    def attempt(what: str, act: Callable[[], Any]) -> None:
        with suppress(OSError):
            act()
            done.append(what)

    def opens(path: str, flags: int) -> None:
        os.close(os.open(path, flags))

    for pid in pids:
        for name in ("mem", "environ", "maps"):
            attempt(f"read {name}", partial(opens, f"/proc/{pid}/{name}", os.O_RDONLY))
        attempt("list descriptors", partial(os.listdir, f"/proc/{pid}/fd"))
        for number in range(_DESCRIPTORS):
            attempt(f"open descriptor {number}", partial(opens, f"/proc/{pid}/fd/{number}", os.O_RDWR))
        for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM, signal.SIGSTOP):
            attempt(f"signal {number}", partial(os.kill, pid, number))
        if libc.ptrace(_PTRACE_ATTACH, pid, 0, 0) == 0:
            done.append("trace")
        with suppress(OSError):
            handle = os.pidfd_open(pid)
            done += [
                f"take {n}" for n in range(_DESCRIPTORS) if libc.syscall(_PIDFD_GETFD, handle, n, 0) >= 0
            ]
    return done


def _try_as_nobody(pids: list[int]) -> list[str]:
    """The attempts of a process of another user; forked, for that user may not read this interpreter's files."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            os.write(write_end, json.dumps(_attempts(pids)).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    attempts: list[str] = json.loads(text)
    return attempts


def _listening(pids: list[int]) -> list[str]:
    """Sockets of these processes that anybody could connect to."""
    own = set()
    for pid in pids:
        with suppress(FileNotFoundError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    target = os.readlink(link)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    own.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in own:
                found.append(f"{name} {fields[1]} state {fields[3]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in own and len(fields) > 7:
            found.append(f"unix {fields[7]}")
    return found


def test_the_stranger_would_get_in_where_the_door_is_open() -> None:
    """Else the test below could not fail."""
    with subprocess.Popen(["sleep", "60"], user=_NOBODY, group=_NOBODY, extra_groups=[], cwd="/") as victim:
        try:
            time.sleep(0.2)
            done = _try_as_nobody([victim.pid])
        finally:
            victim.kill()
    assert "list descriptors" in done
    assert f"signal {signal.SIGSTOP}" in done


def _main(seat: Seat) -> list[float]:
    connect(seat, timeout_s=30)
    total = torch.full((20_000,), float(seat.rank + 1))
    dist.all_reduce(total)  # sockets to all others are there
    seat.emit({"pid": os.getpid()})
    while not seat.stop_requested():
        time.sleep(0.01)
    dist.all_reduce(total)
    tickets = [seat.store.add("tickets/next", 1) for _ in range(10)]
    disconnect()
    return [float(total.mean()), max(tickets)]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_another_user_can_neither_join_nor_read_nor_inject_nor_stall(start: Any) -> None:
    pids: list[int] = []
    seen: dict[str, Any] = {}

    def on_event(rank: int, event: dict[str, Any]) -> bool:
        pids.append(event["pid"])
        if len(pids) < 2:
            return False
        seen["listening"] = _listening([*pids, os.getpid()] if start == "fork" else pids)
        seen["done"] = _try_as_nobody(pids)
        seen["command lines"] = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids]
        return True

    results = launch(_main, ranks=2, start=start, on_event=on_event)
    assert seen["listening"] == []
    assert seen["done"] == []
    assert [result[0] for result in results] == [6.0, 6.0]
    assert max(result[1] for result in results) == 20
    assert not any("token" in line or "secret" in line for line in seen["command lines"])


@pytest.mark.parametrize(
    ("plan", "ranks", "transport"),
    [("server-async", 3, "auto"), ("easgd", 3, "auto"), ("hogwild", 2, "auto"), ("ddp", 2, "sockets")],
)
def test_nor_can_he_where_ranks_serve_share_their_weights_or_speak_over_sockets(
    plan: str, ranks: int, transport: str, tmp_path: Path
) -> None:
    once, reading, tried = (tmp_path / name for name in ("once", "reading", "tried"))

    def hold_on() -> None:
        """In the second epoch, when all have met: until the stranger has tried."""
        if once.exists():
            reading.touch()
            _await(tried)
        once.touch()

    def stranger() -> None:
        _await(reading)
        pids = [os.getpid(), *_children(os.getpid())]
        done = {pid: _try_as_nobody([pid]) for pid in pids}
        done = {pid: what for pid, what in done.items() if what and is_alive(pid)}  # a worker may have ended
        seen.update(listening=_listening(pids), done=done, processes=len(pids))
        tried.touch()

    seen: dict[str, Any] = {}
    thread = threading.Thread(target=stranger)
    thread.start()
    result = plait.train(
        replace(jobs.plain(), data=jobs.Marked(jobs.MARK, hold_on), epochs=2),
        plan,
        ranks,
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
        changes=plait.Changes(settings={"links": {"transport": transport}}),
    )
    thread.join()
    assert seen["processes"] > ranks
    assert (seen["listening"], seen["done"]) == ([], {})
    assert len(result.losses) == 8


def _await(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    """Those that live: of one that has ended and was not asked for yet, anybody may open what is empty."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in tasks for child in path.read_text().split() if is_alive(int(child))]
