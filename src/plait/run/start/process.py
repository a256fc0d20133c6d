"""One worker process, seen from the parent: whether it lives, what it does, how it ends.

In: a process that was started. Out: a `Process`; signals go to it and to everything that it started.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from plait.run.start.child import LOST_SIGNAL


class Process:
    """One worker, seen from the parent."""

    def __init__(self, *, rank: int, pid: int, pipe: int, stacks: int, reap: Callable[[], int]) -> None:
        self.rank = rank
        self.pid = pid  # also the id of the process group that it leads
        self.pipe = pipe  # read end, not blocking
        self.stacks = stacks  # the file into which it dumps its stacks
        self.exit_code: int | None = None  # negative for a signal
        self.on_end: Callable[[int], None] = lambda group: None
        self._reap = reap
        self.clock_ns = 0  # what its clock lacks
        self.host = ""  # where it is; empty for this host

    def poll(self) -> int | None:
        """Return the exit code once the worker has ended; what it started and left behind is killed then."""
        if self.exit_code is None and self._has_ended():
            self.signal(signal.SIGKILL)
            self.exit_code = self._reap()
            self.on_end(self.pid)
        return self.exit_code

    def _has_ended(self) -> bool:
        # Looks without reaping: as long as the worker is a zombie, its process group cannot be taken by a
        # stranger.
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else in this process has reaped it
            return True

    def signal(self, number: int) -> None:
        """Send a signal to the worker and to everything that it started."""
        if self.exit_code is not None:
            return
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # not yet the leader of its group, or nobody is left
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pulse(self) -> tuple[str, float, int]:
        """Its one-letter state, the processor time of all its threads, and the bytes that it has read and written."""
        state, processor_s = _stat(self.pid)
        return state, processor_s, _moved_bytes(self.pid)

    def ask_stack(self) -> str:
        """Have it dump its Python stack, and return its state before; one that was stopped runs on."""
        state, _ = _stat(self.pid)
        os.kill(self.pid, signal.SIGUSR1)
        if state == "T":  # only one that runs can show its stack, and the run is over anyway
            os.kill(self.pid, signal.SIGCONT)
        return state

    def tell_lost(self) -> None:
        """Other ranks are lost."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, LOST_SIGNAL)

    def tell_giver(self) -> None:
        """It reads on the board that it is to hand over what it holds."""

    @property
    def is_silent(self) -> bool:
        """Whether whoever watches it has said nothing for seconds: nobody answers for it."""
        return False

    def why_lost(self) -> str | None:
        """How it was lost where that is no matter of its own; None: it ended."""
        return None


def _stat(pid: int) -> tuple[str, float]:
    """A process's one-letter state and the processor time of all its threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "", 0.0


def _moved_bytes(pid: int) -> int:
    """Bytes that a process has read and written so far; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
