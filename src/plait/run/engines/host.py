"""One task of a run on a host of somebody else's cluster: the same command, as a process that is read and ended.

In: the command line of `plait`, variables, the job's file. Out: what it prints, piece by piece, and how it ends. An
actor of Ray and a task of Spark each hold one.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import cloudpickle

from plait.errors import RunError
from plait.files.scratch import scratch_folder

_MOST_BYTES = 1 << 20
"""Of what it printed that is kept for a reader who does not come."""


_GUARD = "from plait.run.engines.host import end_with_input, hear_signals; hear_signals(); end_with_input(); "
_ENTRY = "from plait.cli.main import main; main()"
CALL = (
    "import os, cloudpickle; from pathlib import Path; "
    "value = cloudpickle.loads(Path(os.environ['PLAIT_GIVEN']).read_bytes())(); "
    "Path(os.environ['PLAIT_VALUE']).write_bytes(cloudpickle.dumps(value))"
)
"""Python that calls the function in the file that PLAIT_GIVEN names, and leaves what it returns at PLAIT_VALUE."""


def hear_signals() -> None:
    """Undo what the thread that started this process keeps from itself, and with it from its children: Ray's threads
    block Ctrl-C."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_input() -> None:
    """End this process when whoever started it is gone, however it went: its standard input ends then."""

    def watch() -> None:
        while os.read(0, 1 << 10):
            pass
        os.kill(os.getpid(), signal.SIGKILL)  # its ranks go with it

    threading.Thread(target=watch, name="plait input", daemon=True).start()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a task ended."""

    task: int
    code: int
    said: str
    """The end of what it printed."""
    value: bytes | None
    """What it left in the file that PLAIT_VALUE names."""


def values_of(ended: Sequence[Ended]) -> list[Any]:
    """What a function returned in every task; an error with the words of the first that failed by itself, not because
    another one was gone."""
    failed = [task for task in ended if task.code or task.value is None]
    if failed:
        first = min(failed, key=lambda task: "ConnectionError" in task.said)
        raise RunError(f"rank {first.task} ended with exit status {first.code}:\n{first.said.rstrip()}")
    return [cloudpickle.loads(task.value) for task in ended]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipped:
    """The file that a job comes from, for hosts that do not have it."""

    word: str
    """Which argument names it: path.py or path.py:function."""
    content: bytes

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Shipped | None":
        """The first argument that names a file of Python; None: the job is a module, or that of a run folder."""
        for word in arguments:
            path = Path(word.partition(":")[0])
            if path.suffix == ".py" and path.is_file():
                return cls(word=word, content=path.read_bytes())
        return None

    def arguments(self, given: Sequence[str], folder: Path, cwd: str) -> list[str]:
        """The arguments on this host: with the file where it was, if that is the same here, else with a copy."""
        path = Path(self.word.partition(":")[0])
        with suppress(OSError):
            if sha256(Path(cwd, path).read_bytes()).digest() == sha256(self.content).digest():
                return list(given)
        copy = folder / path.name
        copy.write_bytes(self.content)
        return [f"{copy}{word[len(str(path)) :]}" if word == self.word else word for word in given]


class HostTask:
    """A process of `plait` on this host."""

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        shipped: Shipped | None,
        cwd: str,
        entry: str | None = None,
    ) -> None:
        """`cwd`: where it runs, if that is here; `entry`: Python to run instead of plait's command line."""
        self._scratch = ExitStack()
        folder = self._scratch.enter_context(scratch_folder())
        given = shipped.arguments(arguments, folder, cwd) if shipped is not None else arguments
        self._process = subprocess.Popen(
            [sys.executable, "-c", _GUARD + (entry or _ENTRY), *given],
            env={**os.environ, **variables},
            cwd=cwd if os.path.isdir(cwd) and os.access(cwd, os.X_OK) else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._said = bytearray()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="plait task", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while piece := os.read(stream.fileno(), 1 << 16):
            with self._changed:
                self._said += piece
                del self._said[:-_MOST_BYTES]
                self._changed.notify_all()
        stream.close()
        self._process.wait()
        with self._changed:
            self._changed.notify_all()

    def read(self, patience_s: float) -> tuple[bytes, int | None]:
        """What it has printed since the last call, and its exit status once it has ended and all was read."""
        with self._changed:
            if not self._said and self._thread.is_alive():
                self._changed.wait(patience_s)
            said, self._said = bytes(self._said), bytearray()
        return said, None if self._thread.is_alive() else self._process.returncode

    def signal(self, number: int) -> None:
        """Ctrl-C, or worse."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def close(self) -> None:
        """End it, whatever it does, with all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._thread.join()
        self._scratch.close()
