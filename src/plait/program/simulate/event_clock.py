"""Time in a simulation in which nobody knows beforehand what comes next.

In: processes, each an iterator that yields the seconds for which it is busy, or what it waits for. Out: they go on in
the order of time.
"""

import heapq
from collections.abc import Iterator

Key = tuple[object, ...]
Process = Iterator["float | Key"]
"""What a rank does: it yields seconds for which it is busy, or what it waits for."""


class Clock:
    """Runs processes in the order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: list[tuple[float, int, Process]] = []
        self._count = 0
        self._happened: set[Key] = set()
        self._waiting: dict[Key, list[Process]] = {}

    def add(self, process: Process, after_s: float = 0.0) -> None:
        """Let a process go on, later."""
        heapq.heappush(self._ready, (self.now_s + after_s, self._count, process))
        self._count += 1

    def happen(self, key: Key) -> None:
        """Something that processes may wait for has happened."""
        self._happened.add(key)
        for process in self._waiting.pop(key, ()):
            self.add(process)

    def run(self) -> None:
        """Until nobody can go on."""
        while self._ready:
            self.now_s, _, process = heapq.heappop(self._ready)
            for wanted in process:
                if isinstance(wanted, float):
                    self.add(process, wanted)
                    break
                if wanted not in self._happened:
                    self._waiting.setdefault(wanted, []).append(process)
                    break
