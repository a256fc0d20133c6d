"""Processes that do not outlive the one that started them, and do not keep it waiting.

`subprocess` waits, without a limit, until the program that it starts runs: a child that is stopped before then stops
its parent too, all threads of it and deaf to every signal but SIGKILL. Here nobody waits.
"""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

_PR_SET_PDEATHSIG = 1
"""Of `prctl` on Linux: a signal when the parent dies."""
BEGAN = (os.getpid(), os.getppid())
"""This process, and who started it, read as early as can be: where it has another parent later, that one is gone. A
fork of this process has other numbers."""
_NOT_STARTED = 127
"""What shells say of a program that could not be started."""
_ALIVE_S = 0.2
"""Between two looks whether a parent lives."""
_LOOK_S = 0.01
"""Between two looks whether a program has ended."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone, however it went.

    The kernel means the thread that forked it: that one must live as long as the process is to.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def end_group_with_parent(parent_pid: int) -> None:
    """Have this process and all of its group, of which it is the first, end when its parent is gone.

    For processes that start others, which the kernel would not end with them.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_ALIVE_S)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="plait-parent", daemon=True).start()


def fork() -> int:
    """Fork. Python 3.12 warns of any native thread; children here use none of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        return os.fork()


def start_program(
    arguments: list[str],
    environment: Mapping[str, str],
    *,
    standard: tuple[int, int, int],
    keep: Collection[int] = (),
    session: bool = False,
) -> int:
    """Start a program in a process group of its own, or a session, and return its process id at once.

    It has the descriptors `standard` as 0, 1, 2 and those to `keep` as they are. Where it cannot be started, its exit
    status is 127.
    """
    pid = fork()
    if pid:
        return pid
    try:
        os.setsid() if session else os.setpgid(0, 0)
        for number, file in enumerate(standard):
            os.dup2(file, number)
        for file in (0, 1, 2, *keep):
            os.set_inheritable(file, True)
        for low, high in pairwise([2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(low + 1, high)
        os.execvpe(arguments[0], arguments, environment)
    finally:
        os._exit(_NOT_STARTED)


def wait_for(pid: int, patience_s: float | None = None) -> int | None:
    """The exit status of a child, negative for a signal; None where it has not ended in time."""
    deadline = None if patience_s is None else time.monotonic() + patience_s
    try:
        while True:
            found, status = os.waitpid(pid, 0 if deadline is None else os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S)
    except ChildProcessError:  # somebody else in this process has reaped it
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A program that has come to its end."""

    status: int
    out: str
    err: str


def run_program(
    arguments: list[str], environment: Mapping[str, str] | None = None, *, patience_s: float
) -> Ended:
    """Run a program, without input, to its end: an OSError where there is none of that name, or it takes longer."""
    if shutil.which(arguments[0]) is None:
        raise FileNotFoundError(f"{arguments[0]} is not installed here")
    given = os.environ if environment is None else environment
    with open(os.devnull, "rb") as null, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = start_program(arguments, given, standard=(null.fileno(), out.fileno(), err.fileno()))
        status = None
        try:
            status = wait_for(pid, patience_s)
        finally:
            if status is None:
                for kill in (os.kill, os.killpg):  # it may not have a group of its own yet
                    with suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
                wait_for(pid)
        if status is None:
            raise TimeoutError(f"{arguments[0]} did not end within {patience_s:g} s")
        for file in (out, err):
            file.seek(0)
        said, complained = (file.read().decode(errors="replace") for file in (out, err))
        return Ended(status=status, out=said, err=complained)
