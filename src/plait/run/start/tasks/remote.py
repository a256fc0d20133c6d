"""A rank of another host, as the first host's parent sees it: like one of its own.

In: what the parent over there tells. Out: a `Process`. Signals are passed on, stacks come back as bytes.
"""

import os
from contextlib import suppress

from plait.run.start.memory_file import anonymous_file
from plait.run.start.process import Process
from plait.run.start.tasks.trunk import Trunk


class RemoteProcess(Process):
    """One worker that another parent watches for this one."""

    def __init__(self, *, rank: int, trunk: Trunk, host: str, clock_ns: int) -> None:
        read_end, self._write_end = os.pipe()
        os.set_blocking(read_end, False)
        super().__init__(
            rank=rank, pid=0, pipe=read_end, stacks=anonymous_file(f"plait-stacks-{rank}"), reap=lambda: 0
        )
        self.host, self.clock_ns = host, clock_ns
        self.trunk = trunk
        self._lost: str | None = None
        self._pulse: tuple[str, float, int] = ("", 0.0, 0)
        self._is_closed = False

    def poll(self) -> int | None:
        """Its exit code, once its parent has told it."""
        return self.exit_code

    def signal(self, number: int) -> None:
        """Have it sent over there."""
        if self.exit_code is None:
            with suppress(OSError):
                self.trunk.send({"op": "signal", "rank": self.rank, "number": number})

    def pulse(self) -> tuple[str, float, int]:
        """As its parent last saw it."""
        return self._pulse

    def ask_stack(self) -> str:
        """Have it asked over there."""
        with suppress(OSError):
            self.trunk.send({"op": "stack", "rank": self.rank})
        return self._pulse[0]

    @property
    def is_silent(self) -> bool:
        """Its task has said nothing for seconds."""
        return self.trunk.is_silent

    def tell_lost(self) -> None:
        """Have it told over there."""
        with suppress(OSError):
            self.trunk.send({"op": "lost", "rank": self.rank})

    def tell_giver(self) -> None:
        """Have it told over there."""
        with suppress(OSError):
            self.trunk.send({"op": "giver", "rank": self.rank})

    def why_lost(self) -> str | None:
        """What became of its host."""
        return self._lost

    # What follows is called by the thread that reads the trunk.
    def take_lines(self, piece: bytes) -> None:
        """What it wrote to its parent."""
        rest = memoryview(piece)
        while rest and not self._is_closed:
            try:
                rest = rest[os.write(self._write_end, rest) :]
            except OSError:  # the monitor has ended
                return

    def take_pulse(self, state: str, processor_s: float, num_bytes: int) -> None:
        """Whether it moves."""
        self._pulse = (state, processor_s, num_bytes)

    def take_stack(self, piece: bytes) -> None:
        """What it dumped."""
        os.write(self.stacks, piece)

    def end(self, code: int, lost: str | None = None) -> None:
        """It has ended; `lost`: nobody knows how."""
        if self.exit_code is None:
            self._is_closed = True
            os.close(self._write_end)
            self._lost = lost
            self.exit_code = code
