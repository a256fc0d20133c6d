"""What asks a run to end: Ctrl-C, SIGTERM, and SIGUSR1, by which batch systems say that time is nearly up.

In: signals. Out: their count.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """Counts signals instead of dying of them; outside of the main thread it sees none."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = number

    def note_once(self, number: int) -> None:
        """Another task was asked to end: the same wish, not a second one."""
        if not self.count:
            self._note(number, None)
