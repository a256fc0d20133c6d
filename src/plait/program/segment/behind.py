"""Compilation behind the steps: a process of its own compiles what segments want, and they run as written meanwhile.

In: what is wanted, as it comes up while steps run. Out: what became of it, asked for between steps; the compiled code
lies on disk. It never waits for that process. A thread would be no help: Inductor is Python, and takes turns with every
op of a step.
"""

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
from plait.torch_private.cache import own_cache
from plait.torch_private.inductor import Like
from plait.units import format_bytes

_CODE = (
    "import json, sys; sys.path[:], parent, requests = json.loads(sys.argv[1]); "
    "from plait.program.segment.compiler import serve; serve(parent, requests)"
)
_ROOM_BYTES = 1 << 30
"""Of GPU memory that must be free: CUDA's context of a process that only compiles takes 0.5 GiB of an H200."""
_READ_BYTES = 1 << 16
"""Read at once."""


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
    is_answered: bool = False
    reason: str | None = None
    """Why it cannot be compiled."""
    is_kept: bool = False
    """Whether it lies compiled on disk; else who takes it compiles it."""


class Behind:
    """What a rank wants, and the process that it has started for that."""

    def __init__(self, device: torch.device, processes: int) -> None:
        """`processes`: that compile kernels at the same time."""
        self._device, self._processes = device, processes
        self._wanted: dict[object, Wanted] = {}
        self._asked: list[Wanted] = []
        """Those that it has not answered, in order."""
        self._told = 0
        """Of these, how many it was told of."""
        self._pid: int | None = None
        self._line, self._answers, self._requests = -1, -1, -1
        """Files: of lengths, of answers, of what is asked."""
        self._heard = b""
        self.lost: str | None = None
        """How the process was lost; nothing more will be compiled."""
        self.no_room: str | None = None
        """Why there is no process; what is wanted is then compiled when it is taken."""

    def want(self, key: object, name: str, graph: fx.GraphModule, inputs: list[Like], step: int) -> Wanted:
        """What was or is now asked for under a key."""
        if key not in self._wanted:
            self._wanted[key] = Wanted(name, graph, inputs, step)
            self._asked.append(self._wanted[key])
        return self._wanted[key]

    @property
    def num_waiting(self) -> int:
        """Graphs that are not in use yet."""
        return len(self._wanted)

    @property
    def settled_until(self) -> float:
        """The last step of which all that was wanted is answered."""
        return min((wanted.step - 1 for wanted in self._asked), default=float("inf"))

    def take(self, step: int) -> list[tuple[object, Wanted]]:
        """What was wanted up to a step, all of it answered; it is forgotten here."""
        taken = [(key, wanted) for key, wanted in self._wanted.items() if wanted.step <= step]
        for key, _ in taken:
            del self._wanted[key]
        return taken

    def hear(self) -> list[tuple[Wanted, float]]:
        """Ask what was not asked yet, and read answers; those that are new, and the seconds that each took."""
        found: list[tuple[Wanted, float]] = []
        if self._asked and self.lost is None:
            if self._pid is None and self.no_room is None:
                self._start()
            if self.no_room is not None:
                for wanted in self._asked:
                    wanted.is_answered = True
                self._asked.clear()
                return found
            try:
                self._tell()
                self._read(found)
            except OSError as error:
                self.lost = str(error)
            if self.lost is not None:
                self.close()
        return found

    def _start(self) -> None:
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if free < _ROOM_BYTES:
                self.no_room = (
                    f"{format_bytes(free)} of GPU memory are free and a process that compiles takes "
                    f"{format_bytes(_ROOM_BYTES)}"
                )
                return
        own_cache()  # the same for both
        self._requests, path = tempfile.mkstemp()
        os.unlink(path)
        given = json.dumps([sys.path, os.getpid(), self._requests])
        child_in, self._line = os.pipe()
        self._answers, child_out = os.pipe()
        with open(os.devnull, "wb") as null:
            self._pid = start_program(
                [sys.executable, "-c", _CODE, given],
                os.environ,
                standard=(child_in, child_out, null.fileno()),
                keep=[self._requests],
            )
        for file in (child_in, child_out):
            os.close(file)
        for file in (self._line, self._answers):
            os.set_blocking(file, False)

    def _tell(self) -> None:
        for wanted in self._asked[self._told :]:
            others = {"inputs": wanted.inputs, "processes": self._processes, "settings": settings()}
            try:
                data = pack_graph(wanted.graph.graph, others)
            except Exception:  # whatever a graph may hold that cannot be written
                wanted.is_answered = True  # it is tried when it is taken
                self._asked.remove(wanted)
                continue
            os.write(self._requests, data)
            os.write(self._line, f"{len(data)}\n".encode())
            self._told += 1

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
            self._told -= 1
            wanted.is_answered = True
            wanted.reason = None if answer["unknown"] else answer["reason"]
            wanted.is_kept = answer["reason"] is None
            found.append((wanted, answer["seconds"]))

    def close(self) -> None:
        """End the process."""
        if self._pid is None:
            return
        for kill in (os.kill, os.killpg):  # it may not have a group of its own yet
            with suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        status = wait_for(self._pid)
        if self.lost is not None:
            self.lost = f"{self.lost} (status {status})"
        self._pid = None
        for file in (self._line, self._answers, self._requests):
            os.close(file)
