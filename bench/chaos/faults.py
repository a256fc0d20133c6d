"""What can happen to a run. Each fault is done to a living run, and says whether it happened.

A fault may come too late, or change what the run never uses again. Where only the run itself shows whether it struck,
that is looked at: by the shim, which counts, or in how the run ended.
"""

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
from typing import Literal

from bench.chaos.cases import HANG_S, Case
from bench.chaos.disks import Disk
from bench.chaos.engines import EngineRun
from bench.chaos.flips import order_flip
from bench.chaos.runs import Phase, Run, kill
from bench.chaos.shim import Shim

_SYS_PIDFD_OPEN, _SYS_PIDFD_GETFD = 434, 438
"""Of Linux 5.6, on all processors that we know."""


Outcome = Literal["done", "maybe", "missed"]
"""Of a fault: it happened; it happened, and may have done more than was meant; it did not."""
Do = Callable[[Run, random.Random, Shim | None], Outcome]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind."""

    do: Do
    loses_a_rank: bool = False
    """Where the plan can spare it the run goes on, without the shares that it held."""
    harmless: bool = False
    """The run ends as if nothing had happened."""
    slows: bool = False
    """It may take longer then."""
    asks_to_end: bool = False
    """The run ends because of it, and says so, wherever there was something left to do."""
    seen: Literal["at once", "by the shim", "at the end"] = "at once"
    """Where it shows whether it struck; at the end: in a run that did not end as if nothing had happened."""
    aim: Phase | None = None
    """The only phase in which it can strike; None: any."""
    disk: Disk | None = None
    """What the folder must lie on; None: anything."""
    of_tasks: bool = False
    """Whether it is done to a task of an engine, or to the engine."""
    of_replicas: bool = False
    """Whether only ranks that hold the same can find it."""

    @property
    def needs_shim(self) -> bool:
        return self.seen == "by the shim"

    @property
    def needs_mount(self) -> bool:
        return self.disk is not None

    def suits(self, case: Case) -> bool:
        """Whether it can happen to such a run: the shim wakes up in one session, and engines start many."""
        if self.of_replicas and not case.has_replicas:
            return False
        if case.engine is None:
            return not self.of_tasks
        return not (self.needs_shim or self.needs_mount)


def _target(run: Run, choice: random.Random, of_parent: bool) -> int:
    ranks = run.ranks()
    return run.pid if of_parent or not ranks else choice.choice(ranks)


def _sent(pid: int, *numbers: int, pause_s: float = 0.0) -> bool:
    """Send signals, one after the other; whether there was somebody to take them all."""
    try:
        for count, number in enumerate(numbers):
            if count:
                time.sleep(pause_s)
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _signal(number: int, *, of_parent: bool) -> Do:
    def do(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
        return "done" if _sent(_target(run, choice, of_parent), number) else "missed"

    return do


def _pause(*, of_parent: bool) -> Do:
    def do(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
        began, pid = time.monotonic(), _target(run, choice, of_parent)
        if not _sent(pid, signal.SIGSTOP, signal.SIGCONT, pause_s=choice.uniform(0.1, 0.8)):
            return "missed"
        return "done" if time.monotonic() - began < HANG_S / 2 else "maybe"  # this process was paused itself

    return do


def _stop_a_rank(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """Of a run that has no ranks (yet), the only process: then it goes on, for nobody is there who could tell."""
    ranks = run.ranks()  # once: those of a run that ends may be gone at the next look
    if not ranks:
        return _pause(of_parent=True)(run, choice, shim)
    return "done" if _sent(choice.choice(ranks), signal.SIGSTOP) else "missed"


def _ask_everybody(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """As Slurm and systemd do, in any order; of an engine its tasks: srun ends all at once when asked twice."""
    tasks = [run.tree(task) for task in run.tasks()] if isinstance(run, EngineRun) else [run.members()]
    members = [pid for tree in tasks for pid in tree]
    choice.shuffle(members)
    sent = [_sent(pid, signal.SIGTERM) for pid in members]
    return "done" if any(sent) else "missed"


def _interrupt_twice(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """The second may find that the first was enough."""
    both = _sent(run.pid, signal.SIGINT, signal.SIGINT, pause_s=choice.uniform(0.0, 0.2))
    return "done" if both else "missed"


def _kill_a_task(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """With all that it has started, as where a host is lost; or alone."""
    assert isinstance(run, EngineRun)
    task = choice.choice(sorted(run.tasks()))
    kill(run.tree(task) if choice.random() < 0.7 else [run.tasks()[task]])
    return "done"


def _freeze_a_task(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """All of a host stands still, for longer than the others wait for it; then it finds out that it is alone."""
    assert isinstance(run, EngineRun)
    tree = run.tree(choice.choice(sorted(run.tasks())))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in tree:
            _sent(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(2 * HANG_S + 2)
    return "maybe"


def _signal_the_engine(number: int) -> Do:
    def do(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
        assert isinstance(run, EngineRun)
        return "done" if _sent(choice.choice(run.launchers), number) else "missed"

    return do


def _no_more_files(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """No file may grow: every write fails."""
    assert shim is not None
    shim.set(session=run.pid)
    for pid in run.members():
        with suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return "done"


def _no_more_memory(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    try:
        pid = _target(run, choice, False)
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    except (ProcessLookupError, PermissionError):
        return "missed"
    return "done"


def _fill_the_disk(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """The folder is on a disk of its own, of which nothing is left."""
    assert shim is not None
    shim.set(session=run.pid)
    filler = run.folder.parent / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return "done"


def _turn_read_only(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """As ext4 does after an error: what was not synced is lost."""
    order = ["mount", "-o", "remount,abort", str(run.folder.parent)]
    done = subprocess.run(order, capture_output=True, check=False)
    return "done" if done.returncode == 0 else "missed"


def _cut_a_link(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """Shut one of the sockets between two processes of the run, at both ends."""
    sockets = [(pid, fd) for pid in run.ranks() for fd in _sockets_of(pid)]
    if not sockets:
        return "missed"
    try:
        _shut(*choice.choice(sockets))
    except OSError:
        return "missed"
    return "done"


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


def _flip_a_bit(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
    """Of a weight, on one rank, after its next update."""
    rank = choice.randrange(run.num_ranks)
    order_flip(run.folder, rank)
    return "done"


def _slow(**how: tuple[int, int]) -> Do:
    def do(run: Run, choice: random.Random, shim: Shim | None) -> Outcome:
        assert shim is not None
        shim.set(session=run.pid, **{name: choice.randint(*between) for name, between in how.items()})
        return "done"

    return do


def _slowed(aim: Phase | None = None, **how: tuple[int, int]) -> Fault:
    return Fault(do=_slow(**how), harmless=True, slows=True, seen="by the shim", aim=aim)


FAULTS: dict[str, Fault] = {
    "kill a rank": Fault(do=_signal(signal.SIGKILL, of_parent=False), loses_a_rank=True),
    "kill the parent": Fault(do=_signal(signal.SIGKILL, of_parent=True)),
    "crash a rank": Fault(do=_signal(signal.SIGSEGV, of_parent=False), loses_a_rank=True),
    "stop a rank": Fault(do=_stop_a_rank, loses_a_rank=True),
    "pause a rank": Fault(do=_pause(of_parent=False), harmless=True),
    "pause the parent": Fault(do=_pause(of_parent=True), harmless=True),
    "SIGTERM": Fault(do=_signal(signal.SIGTERM, of_parent=True), asks_to_end=True),
    "SIGTERM to all": Fault(do=_ask_everybody, asks_to_end=True),
    "Ctrl-C": Fault(do=_signal(signal.SIGINT, of_parent=True), asks_to_end=True),
    "Ctrl-C twice": Fault(do=_interrupt_twice, asks_to_end=True),
    "kill a task": Fault(do=_kill_a_task, loses_a_rank=True, of_tasks=True),
    "freeze a task": Fault(do=_freeze_a_task, loses_a_rank=True, of_tasks=True),
    "SIGTERM engine": Fault(do=_signal_the_engine(signal.SIGTERM), asks_to_end=True, of_tasks=True),
    "kill engine": Fault(do=_signal_the_engine(signal.SIGKILL), loses_a_rank=True, of_tasks=True),
    "no more files": Fault(do=_no_more_files, loses_a_rank=True, seen="by the shim"),
    "full disk": Fault(do=_fill_the_disk, loses_a_rank=True, seen="by the shim", disk="memory"),
    "read-only disk": Fault(do=_turn_read_only, loses_a_rank=True, seen="at the end", disk="ext4"),
    "no memory": Fault(do=_no_more_memory, loses_a_rank=True, seen="at the end"),
    "flip a bit": Fault(do=_flip_a_bit, of_replicas=True, seen="at the end"),
    "lost link": Fault(do=_cut_a_link, loses_a_rank=True),
    "slow link": _slowed(link_us=(200, 5_000)),
    "slow disk": _slowed(disk_us=(1_000, 100_000)),
    "clock back": _slowed("start", clock_s=(-(10**8), -60)),
    "clock ahead": _slowed("start", clock_s=(60, 10**8)),
}
