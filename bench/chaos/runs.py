"""A run in a process and session of its own: started, looked at, waited for, ended."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import plait
from bench.chaos.cases import HANG_S, SAVE_EVERY, Case, job
from bench.chaos.flips import obey_flips
from plait.errors import PlaitError, lacks_memory
from plait.run.start.board import Board, State

Phase = Literal["start", "training", "evaluation", "saving", "ending"]
PHASES: tuple[Phase, ...] = ("start", "training", "evaluation", "saving", "ending")
_LABELS: dict[str, Phase] = {"evaluate": "evaluation", "checkpoint": "saving", "finish": "ending"}
_ASKS = (signal.SIGINT, signal.SIGTERM)
_NO_MEMORY = b'{"error": "MemoryError", "text": ""}'
"""What a process tells that has none to say more."""


@dataclass
class Ended:
    """How a run ended."""

    code: int | None
    """None: it had to be killed."""
    seconds: float
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def ended_as_ever(self) -> bool:
        """Whether it came to its end with all of its ranks, as if nothing had happened."""
        noticed = self.told.get("stopped") or any(
            words in notice for notice in self.told.get("notices", ()) for words in ("go on", "goes back")
        )
        return self.code == 0 and not noticed


class Run(ABC):
    """One of them."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.folder = folder
        self.num_ranks = case.resolved().processes
        self._board: Board | None = None

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process that watches over all ranks."""

    @abstractmethod
    def members(self) -> list[int]:
        """All living processes of it."""

    @abstractmethod
    def ranks(self) -> list[int]:
        """Its ranks, as far as they have started."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether it has ended."""

    @abstractmethod
    def ended(self) -> tuple[int, dict[str, Any]]:
        """Status and last words of a run that is over; negative: it was killed."""

    @abstractmethod
    def end(self) -> None:
        """Kill all of it."""

    def phase(self) -> Phase:
        """What it does now, of several ranks the rarest thing."""
        if any(self.folder.glob("checkpoints/.*")):
            return "saving"
        if self.num_ranks == 1:
            return "training" if (self.folder / "environment.json").exists() else "start"
        board = self.board()
        if board is None and (self.folder / "metrics.jsonl").exists():
            return "ending"  # there was one
        entries = [entry for entry in board.read_all() if entry is not None] if board is not None else []
        labels = {entry.label for entry in entries if entry.state is not State.GONE}
        for label, phase in _LABELS.items():
            if label in labels:
                return phase
        if any(entry.state is State.DONE for entry in entries):
            return "ending"
        return "training" if any(entry.step >= 0 for entry in entries) else "start"

    def board(self) -> Board | None:
        """What its ranks say that they do, once there is one."""
        if self._board is None:
            with suppress(OSError):
                for path in Path(f"/proc/{self.pid}/fd").iterdir():
                    if "memfd:plait-board" in os.readlink(path):
                        file = os.open(path, os.O_RDWR)
                        try:
                            self._board = Board(file, self.num_ranks)
                            break
                        except ValueError:  # not as long as it will be, or of a trial before the run
                            os.close(file)
        return self._board

    def close_board(self) -> None:
        """Let go of it: a run that is started next would inherit it."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def wait(self, limit_s: float) -> Ended:
        """Its end; it is killed after the limit."""
        began = time.monotonic()
        while not self.is_over() and time.monotonic() - began < limit_s:
            time.sleep(0.01)
        seconds, in_time = time.monotonic() - began, self.is_over()
        if not in_time:
            self._show()
            self.end()
        code, told = self.ended()
        self.close_board()
        return Ended(code=code if in_time else None, seconds=seconds, told=told)

    def _show(self) -> None:
        """The parent's stack, on standard error, and where its ranks are: it has not ended."""
        text = f"process {self.pid} and {self.ranks()} have not ended; the stack of the first:"
        print(text, file=sys.stderr, flush=True)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)
        time.sleep(0.5)


class ForkedRun(Run):
    """A run of this host, in a process and session of its own."""

    def __init__(self, case: Case, folder: Path, *, resume: bool, hang_s: float = HANG_S) -> None:
        super().__init__(case, folder)
        read_end, write_end = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)  # until it can hear them
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read_end)
            os.setsid()
            code, said = be_the_run(case, folder, resume, hang_s)
            try:
                os.write(write_end, said)
            finally:  # whatever happens: this process must not go on as its parent
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
        os.close(write_end)
        self._pipe = read_end
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._pid

    def members(self) -> list[int]:
        """All of its session."""
        return [pid for pid, stat in everybody() if stat[3] == str(self.pid) and stat[0] not in "ZX"]

    def ranks(self) -> list[int]:
        """Its processes without the first."""
        return [pid for pid in self.members() if pid != self.pid]

    def is_over(self) -> bool:
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def ended(self) -> tuple[int, dict[str, Any]]:
        with os.fdopen(self._pipe) as pipe:
            text = pipe.read()
        assert self._code is not None
        return self._code, json.loads(text) if text else {}

    def end(self) -> None:
        self.close_board()
        kill(self.members())
        if self._code is None:
            os.waitpid(self.pid, 0)
            self._code = -9


def kill(pids: Iterable[int]) -> None:
    """End them all at once."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def everybody() -> list[tuple[int, list[str]]]:
    """Every process, and what its `stat` says after its name."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                found.append((int(path.name), (path / "stat").read_text().rpartition(")")[2].split()))
    return found


def be_the_run(case: Case, folder: Path, resume: bool, hang_s: float = HANG_S) -> tuple[int, bytes]:
    """Train in this process, whatever comes of it: its status and last words."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, in the background of a shell
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    told: dict[str, Any] = {}
    notices: list[str] = []
    noticed_at: list[float] = []

    def listen(event: dict[str, Any]) -> None:
        if "notice" in event:
            notices.append(event["notice"])
            noticed_at.append(time.monotonic())

    code = 1
    try:
        obey_flips(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
        options: dict[str, Any] = {
            "job": job(), "plan": case.resolved(), "out": folder, "limits": plait.Limits(hang_s=hang_s),
            "saving": plait.Saving(checkpoint_every=SAVE_EVERY, record_samples=True, trace=False),
            "watching": plait.Watching(listener=listen),
        }  # fmt: skip
        result = plait.resume(folder, **options) if resume else plait.train(**options)
        told = {"losses": result.losses, "stopped": result.stopped}
        code = 0
    except PlaitError as error:
        told = {"error": type(error).__name__, "text": str(error)[:2000]}
    except KeyboardInterrupt as error:
        told = {"error": "interrupted", "text": str(error)}
    except BaseException as error:
        if lacks_memory(error):
            return 1, _NO_MEMORY
        told = {"error": "TRACEBACK", "text": traceback.format_exc()[-3000:]}
    return code, json.dumps(told | {"notices": notices, "noticed_at": noticed_at}).encode()[: 1 << 16]
