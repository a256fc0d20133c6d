"""What started this task, and that the task does not outlive it.

In: a variable that an engine sets in every task that it starts. Out: a thread that ends this process once the engine's
process on this host is gone, however it went: a torchrun agent that is killed cannot end its tasks, and nobody else
would.

The engine is the nearest process above that does not have the variable: shells and scripts in between do. What happens
above it is its own affair: it may well outlive the terminal or the script that it was started from.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from plait.processes import BEGAN
from plait.threads import start_thread

_LOOK_S = 0.5
"""Between two looks whether it is there."""
_GRACE_S = 60.0
"""For a task that is asked to end: it may save, for which a run takes 30 s at most, and tell others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """The processes that lead from this one to the engine's."""

    line: tuple[int, ...]
    """Process ids, each started by the next: this process first, the engine's last."""

    @classmethod
    def find(cls, variable: str) -> "Starter":
        """Who started this process with that variable in its environment."""
        line, above = [os.getpid()], os.getppid()
        if BEGAN[0] == os.getpid() and BEGAN[1] != above:  # gone while this process began
            return cls(line=BEGAN)
        while above > 1 and _has(above, variable):
            line.append(above)
            above = _parent(above)
        return cls(line=(*line, above))

    def is_gone(self) -> bool:
        """Whether the line is broken: whoever lost its parent has been given another."""
        return any(_parent(below) != above for below, above in pairwise(self.line))


def end_with_starter(variable: str, *, asks: bool, told: str) -> None:
    """Watch what started this process; once it is gone say so, then ask this process to end, as by SIGTERM, or
    just end it. Its ranks go with it."""
    starter, pid = Starter.find(variable), os.getpid()

    def watch() -> None:
        while not starter.is_gone():
            time.sleep(_LOOK_S)
        with suppress(OSError):  # what it prints to may be gone too
            print(told, file=sys.stderr, flush=True)
        if asks:
            os.kill(pid, signal.SIGTERM)
            time.sleep(_GRACE_S)
        os.kill(pid, signal.SIGKILL)

    start_thread(threading.Thread(target=watch, name="plait starter", daemon=True))


def _has(pid: int, variable: str) -> bool:
    """Whether a process was started with a variable; what belongs to another user, as Slurm's own, is no task."""
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(entry.startswith(variable.encode() + b"=") for entry in found)


def _parent(pid: int) -> int:
    """The parent of a process; -1: it is gone."""
    if pid == os.getpid():
        return os.getppid()
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return -1
