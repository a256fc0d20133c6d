"""What can happen to a run. Each fault is done to a living run, and says what it has done."""

import ctypes
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.chaos.cases import HANG_S
from bench.chaos.runs import Run
from bench.chaos.shim import Shim

_SYS_PIDFD_OPEN, _SYS_PIDFD_GETFD = 434, 438
"""Of Linux 5.6, on all processors that we know."""
DISK_BYTES = 16 << 20
"""Of a disk that is filled: a few checkpoints of the job."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind."""

    do: Callable[[Run, random.Random, Shim | None], bool]
    """False: it is not known that it did no harm, though the kind is harmless."""
    loses_a_rank: bool = False
    """Where the plan can spare it the run goes on, without the shares that it held."""
    harmless: bool = False
    """The run ends as if nothing had happened."""
    needs_shim: bool = False
    needs_mount: bool = False


def _target(run: Run, choice: random.Random, of_parent: bool) -> int:
    ranks = run.ranks()
    return run.pid if of_parent or not ranks else choice.choice(ranks)


def _signal(number: int, *, of_parent: bool) -> Callable[[Run, random.Random, Shim | None], bool]:
    def do(run: Run, choice: random.Random, shim: Shim | None) -> bool:
        with suppress(ProcessLookupError):
            os.kill(_target(run, choice, of_parent), number)
        return True

    return do


def _pause(*, of_parent: bool) -> Callable[[Run, random.Random, Shim | None], bool]:
    def do(run: Run, choice: random.Random, shim: Shim | None) -> bool:
        began = time.monotonic()
        with suppress(ProcessLookupError):
            pid = _target(run, choice, of_parent)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(choice.uniform(0.1, 0.8))
            os.kill(pid, signal.SIGCONT)
        return time.monotonic() - began < HANG_S / 2  # else this process was paused itself

    return do


def _stop_a_rank(run: Run, choice: random.Random, shim: Shim | None) -> bool:
    """Of a run that has no ranks (yet), the only process: then it goes on, for nobody is there who could tell."""
    if not run.ranks():
        return _pause(of_parent=True)(run, choice, shim)
    with suppress(ProcessLookupError):
        os.kill(_target(run, choice, False), signal.SIGSTOP)
    return True


def _interrupt_twice(run: Run, choice: random.Random, shim: Shim | None) -> bool:
    for _ in range(2):
        with suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGINT)
        time.sleep(choice.uniform(0.0, 0.2))
    return True


def _no_more_files(run: Run, choice: random.Random, shim: Shim | None) -> bool:
    """No file may grow: every write fails."""
    for pid in run.members():
        with suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return True


def _no_more_memory(run: Run, choice: random.Random, shim: Shim | None) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        pid = _target(run, choice, False)
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    return True


def _fill_the_disk(run: Run, choice: random.Random, shim: Shim | None) -> bool:
    """The folder is on a disk of its own, of which nothing is left."""
    filler = run.folder.parent / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return True


def _cut_a_link(run: Run, choice: random.Random, shim: Shim | None) -> bool:
    """Shut one of the sockets between two processes of the run, at both ends."""
    sockets = [(pid, fd) for pid in run.ranks() for fd in _sockets_of(pid)]
    if not sockets:
        return _signal(signal.SIGKILL, of_parent=False)(run, choice, shim)
    with suppress(OSError):
        _shut(*choice.choice(sockets))
    return True


def _sockets_of(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if stat.S_ISSOCK(path.stat().st_mode):
                    found.append(int(path.name))
    return sorted(found)


def _shut(pid: int, fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.syscall(_SYS_PIDFD_OPEN, pid, 0)
    if handle < 0:
        raise OSError(ctypes.get_errno(), "pidfd_open")
    try:
        copy = libc.syscall(_SYS_PIDFD_GETFD, handle, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        with socket.socket(fileno=copy) as end:
            end.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(handle)


def _slow(**how: tuple[int, int]) -> Callable[[Run, random.Random, Shim | None], bool]:
    def do(run: Run, choice: random.Random, shim: Shim | None) -> bool:
        assert shim is not None
        shim.set(session=run.pid, **{name: choice.randint(*between) for name, between in how.items()})
        return True

    return do


FAULTS: dict[str, Fault] = {
    "kill a rank": Fault(do=_signal(signal.SIGKILL, of_parent=False), loses_a_rank=True),
    "kill the parent": Fault(do=_signal(signal.SIGKILL, of_parent=True)),
    "crash a rank": Fault(do=_signal(signal.SIGSEGV, of_parent=False), loses_a_rank=True),
    "stop a rank": Fault(do=_stop_a_rank, loses_a_rank=True),
    "pause a rank": Fault(do=_pause(of_parent=False), harmless=True),
    "pause the parent": Fault(do=_pause(of_parent=True), harmless=True),
    "SIGTERM": Fault(do=_signal(signal.SIGTERM, of_parent=True)),
    "Ctrl-C": Fault(do=_signal(signal.SIGINT, of_parent=True)),
    "Ctrl-C twice": Fault(do=_interrupt_twice),
    "no more files": Fault(do=_no_more_files, loses_a_rank=True),
    "full disk": Fault(do=_fill_the_disk, loses_a_rank=True, needs_mount=True),
    "no memory": Fault(do=_no_more_memory, loses_a_rank=True),
    "lost link": Fault(do=_cut_a_link, loses_a_rank=True),
    "slow link": Fault(do=_slow(link_us=(200, 5_000)), harmless=True, needs_shim=True),
    "slow disk": Fault(do=_slow(disk_us=(1_000, 100_000)), harmless=True, needs_shim=True),
    "clock back": Fault(do=_slow(clock_s=(-(10**8), -60)), harmless=True, needs_shim=True),
    "clock ahead": Fault(do=_slow(clock_s=(60, 10**8)), harmless=True, needs_shim=True),
}


def can_mount(place: Path) -> bool:
    """Whether this user may make small disks."""
    place.mkdir()
    if not mount(place):
        return False
    unmount(place)
    return True


def mount(place: Path) -> bool:
    """Make a small disk of a folder."""
    order = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(place)]
    try:
        return subprocess.run(order, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def unmount(place: Path) -> None:
    """Let go of it."""
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)
