"""Compilation behind the steps: a process of its own compiles what segments want, and they run as written meanwhile.

In: what is wanted, as it comes up while steps run. Out: what became of it, asked for between steps; the compiled code
lies on disk. It never waits for that process, nor for another rank. A thread would be no help: Inductor is Python, and
takes turns with every op of a step. Ranks of a host that want the same compile it once: each claims a graph before it
has it compiled, and looks for those that others have claimed.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from plait.processes import start_program, wait_for
from plait.program.segment.compiler import settings
from plait.program.segment.graph_bytes import pack_graph
from plait.torch_private.cache import Claim, claim
from plait.torch_private.inductor import Like
from plait.units import format_bytes
from plait.version import VERSION

_CODE = (
    "import json, sys; sys.path[:], parent, requests = json.loads(sys.argv[1]); "
    "from plait.program.segment.compiler import serve; serve(parent, requests)"
)
_ROOM_BYTES = 1 << 30
"""Of GPU memory that must be free: CUDA's context of a process that only compiles takes 0.5 GiB of an H200."""
_READ_BYTES = 1 << 16
"""Read at once."""
_AHEAD = 2
"""Graphs that a rank has claimed at a time: one that is compiled, and the next. Others are left for other ranks."""


@dataclass(slots=True)
class Wanted:
    """One graph that is to be compiled."""

    name: str
    """Of the first segment that wants it."""
    graph: fx.GraphModule
    inputs: list[Like]
    step: int
    """In which it was wanted first."""
    puts: list[Callable[[Callable[..., Any] | None], None]] = field(default_factory=list)
    """Called with what was compiled, or None."""
    reason: str | None = None
    """Why it cannot be compiled."""
    is_kept: bool = False
    """Whether it lies compiled on disk; else who takes it compiles it."""
    others: bool = False
    """Whether another process was seen to compile it."""
    claimed: Claim | None = None
    """Held while the process here compiles it."""


class Behind:
    """What a rank wants, and the process that it has started for that."""

    def __init__(self, device: torch.device, processes: int) -> None:
        """`processes`: that compile kernels at the same time."""
        self._device, self._processes = device, processes
        self._wanted: dict[object, Wanted] = {}
        self._open: list[Wanted] = []
        """Those that nobody has answered, in order."""
        self._asked: list[Wanted] = []
        """Of these, those that the process here was asked for, in order."""
        self._pid: int | None = None
        self._line, self._answers, self._requests, self._errors = -1, -1, -1, -1
        """Files: of lengths, of answers, of what is asked, of what it complains of."""
        self._heard = b""
        self.lost: str | None = None
        """How the process was lost; nothing more will be compiled."""
        self.no_room: str | None = None
        """Why there is no process; what is wanted is then compiled when it is taken."""

    def want(self, key: object, name: str, graph: fx.GraphModule, inputs: list[Like], step: int) -> Wanted:
        """What was or is now asked for under a key."""
        if key not in self._wanted:
            self._wanted[key] = Wanted(name, graph, inputs, step)
            self._open.append(self._wanted[key])
        return self._wanted[key]

    @property
    def num_waiting(self) -> int:
        """Graphs that are not in use yet."""
        return len(self._wanted)

    @property
    def num_open(self) -> int:
        """Of these, those that are not compiled yet."""
        return len(self._open)

    @property
    def settled_until(self) -> float:
        """The last step of which all that was wanted is answered."""
        return min((wanted.step - 1 for wanted in self._open), default=float("inf"))

    def take(self, step: int) -> list[tuple[object, Wanted]]:
        """What was wanted up to a step, all of it answered; it is forgotten here."""
        taken = [(key, wanted) for key, wanted in self._wanted.items() if wanted.step <= step]
        for key, _ in taken:
            del self._wanted[key]
        return taken

    def hear(self) -> list[tuple[Wanted, float]]:
        """Ask what was not asked yet, and read answers; what is new of these, and the seconds that each took.

        What can only be tried here, by who takes it, is answered too, and not among them.
        """
        found: list[tuple[Wanted, float]] = []
        if not self._open or self.lost is not None:
            return found
        try:
            if self._pid is not None:
                self._read(found)
            for wanted in list(self._open) if self.lost is None else ():
                if wanted.claimed is None and len(self._asked) < _AHEAD:
                    self._ask(wanted, found)
        except OSError as error:
            self.lost = str(error)
        if self.lost is not None:
            self.close()
        return found

    def _ask(self, wanted: Wanted, found: list[tuple[Wanted, float]]) -> None:
        """Look for it on disk, or claim it and have it compiled, or leave it to who has claimed it."""
        given = settings()
        text = f"{wanted.graph.code}{wanted.inputs}{sorted(given.items())}{VERSION}{torch.__version__}"
        claimed = claim(hashlib.sha256(text.encode()).hexdigest()[:32])
        if claimed is None:
            wanted.others = True
            return
        data = self._packed(wanted, given) if claimed.said is None else None
        if data is None or (self._pid is None and not self._start()):
            wanted.is_kept = claimed.said is not None  # else it is tried when it is taken
            claimed.release()
            seconds = (
                float(claimed.said or 0.0) if wanted.others else 0.0
            )  # by a rank of this run, or long ago
            self._answer(wanted, seconds, found)
            return
        wanted.claimed = claimed
        self._asked.append(wanted)
        os.write(self._requests, data)
        os.write(self._line, f"{len(data)}\n".encode())

    def _packed(self, wanted: Wanted, given: dict[str, Any]) -> bytes | None:
        """What the process is asked; None where it cannot be written down."""
        others = {"inputs": wanted.inputs, "processes": self._processes, "settings": given}
        try:
            return pack_graph(wanted.graph.graph, others)
        except Exception:  # whatever a graph may hold
            return None

    def _answer(self, wanted: Wanted, seconds: float, found: list[tuple[Wanted, float]]) -> None:
        self._open.remove(wanted)
        if wanted.is_kept or wanted.reason is not None:
            found.append((wanted, seconds))

    def _start(self) -> bool:
        """Start the process; False where the device has no room for it."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if free < _ROOM_BYTES:
                self.no_room = (
                    f"{format_bytes(free)} of GPU memory are free and a process that compiles takes "
                    f"{format_bytes(_ROOM_BYTES)}"
                )
                return False
        self._requests, self._errors = (_unnamed_file() for _ in range(2))
        given = json.dumps([sys.path, os.getpid(), self._requests])
        child_in, self._line = os.pipe()
        self._answers, child_out = os.pipe()
        self._pid = start_program(
            [sys.executable, "-c", _CODE, given],
            os.environ,
            standard=(child_in, child_out, self._errors),
            keep=[self._requests],
        )
        for file in (child_in, child_out):
            os.close(file)
        for file in (self._line, self._answers):
            os.set_blocking(file, False)
        return True

    def _read(self, found: list[tuple[Wanted, float]]) -> None:
        try:
            while data := os.read(self._answers, _READ_BYTES):
                self._heard += data
            self.lost = "the process that compiles has ended"
        except BlockingIOError:
            pass
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            wanted = self._asked.pop(0)
            assert wanted.claimed is not None
            wanted.reason = None if answer["unknown"] else answer["reason"]
            wanted.is_kept = answer["reason"] is None
            wanted.claimed.release(f"{answer['seconds']:.3f}" if wanted.is_kept else None)
            self._answer(wanted, answer["seconds"], found)

    def close(self) -> None:
        """End the process, whatever it is at."""
        if self._pid is None:
            return
        for kill in (os.kill, os.killpg):  # it may not have a group of its own yet
            with suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        status = wait_for(self._pid)
        if self.lost is not None:
            said = os.pread(self._errors, _READ_BYTES, max(0, os.fstat(self._errors).st_size - _READ_BYTES))
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            self.lost = f"{self.lost} ({', '.join([f'status {status}', *last])})"
        self._pid = None
        for wanted in self._asked:
            assert wanted.claimed is not None
            wanted.claimed.release()
        self._asked.clear()
        for file in (self._line, self._answers, self._requests, self._errors):
            os.close(file)


def _unnamed_file() -> int:
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file
