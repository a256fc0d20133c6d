"""Nothing that a run has started outlives it, also where the run is killed and cannot clean up.

In: the process groups of ranks as they come and go. Out: a tiny process beside the run that waits for the run's end. If
it comes without a word, the run was killed, or had no memory left to clean up: the groups of its ranks are ended, with
whatever datasets started in them, and so is every process that inherited the run's mark in its environment, also from a
run of one rank. Ranks themselves die with their parent (`die_with_parent`). What leaves its group and wipes its
environment gets away.
"""

import os
import signal
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self
from uuid import uuid4

from plait.processes import start_program, wait_for

_MARK = "PLAIT_RUN"
"""The variable of the environment by which what a run has started is known."""
_END_S = 2.0
"""For which it may take to end by itself."""
_CODE = """
import os, signal, sys, time
os.chdir("/")
mark, groups, rest = sys.argv[1].encode(), set(), b""
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while data := os.read(0, 65536):
    *lines, rest = (rest + data).split(b"\\n")
    for line in lines:
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
if b"end" in rest:
    sys.exit()
def end(kill, pid):
    try:
        kill(pid, signal.SIGKILL)
    except OSError:
        pass
for group in groups:
    end(os.killpg, group)
quiet = 0
for _ in range(100):  # one may be born, or between two programs, while the others are looked at
    quiet += 1
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(name)}/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    end(os.kill, int(name))
                    quiet = 0
        except (OSError, ValueError):
            continue
    if quiet == 5:
        break
    time.sleep(0.1)
"""


class Guardian:
    """Held for as long as a run lasts."""

    def __init__(self) -> None:
        self._token = f"{_MARK}={os.getpid()}-{uuid4().hex}"
        self._before: str | None = None
        self._pid = 0
        self._line = -1

    def __enter__(self) -> Self:
        clean = {name: value for name, value in os.environ.items() if name != _MARK}
        command = [sys.executable, "-I", "-S", "-c", _CODE, self._token]
        read_end, self._line = os.pipe()
        with os.fdopen(read_end, "rb") as line, open(os.devnull, "wb") as null:
            standard = (line.fileno(), null.fileno(), null.fileno())
            self._pid = start_program(command, clean, standard=standard, session=True)
        self._before = os.environ.get(_MARK)
        os.environ[_MARK] = self._token.partition("=")[2]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            os.environ.pop(_MARK, None)
        else:
            os.environ[_MARK] = self._before
        if not isinstance(error, MemoryError):  # without memory, this process may not have ended its ranks
            self._say(b"end")
        os.close(self._line)
        if wait_for(self._pid, _END_S) is None:  # somebody has stopped it
            os.kill(self._pid, signal.SIGKILL)
            wait_for(self._pid)

    def fileno(self) -> int:
        """Its line, which no other process may keep open."""
        return self._line

    def watch(self, group: int) -> None:
        """A process group belongs to the run."""
        self._say(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """It is gone; its number may be another's soon."""
        self._say(b"-%d\n" % group)

    def _say(self, text: bytes) -> None:
        with suppress(OSError):  # somebody has killed it: the run goes on without
            os.write(self._line, text)
