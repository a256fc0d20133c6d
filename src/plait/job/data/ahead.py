"""Steps that are read ahead, between the thread that reads and the loader that gives them out.

In: steps, as there is room for them. Out: the same in order, then an end, which may be an error.
"""

import contextlib
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from plait.job.data.share import LoadedStep

_LOOK_S = 1.0
"""Between two looks at whether the thread that reads ahead still lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """Nothing comes after this."""

    error: BaseException | None = None


class Ahead:
    """At most `depth` steps that are ready, then an end. SimpleQueues: in C, and safe inside a finalizer."""

    def __init__(self, depth: int) -> None:
        self._ready: queue.SimpleQueue[LoadedStep | _End] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self.closed = False

    def wait(self) -> bool:
        """Wait for room for one more step; False when nobody wants more."""
        self._room.get()
        return not self.closed

    def put(self, step: LoadedStep) -> None:
        """Add a step for which there is room."""
        if not self.closed:
            self._ready.put(step)

    def end(self, error: BaseException | None) -> None:
        """Nothing comes any more, because of an error where there is one."""
        self._ready.put(_End(error=error))

    def take(self, is_filled: Callable[[], bool]) -> LoadedStep | None:
        """The next step; None at the end. An error comes after the steps that were read before it."""
        step = _End() if self.closed else self._next(is_filled)
        if isinstance(step, LoadedStep):
            self._room.put(None)
            return None if self.closed else step
        self._ready.put(step)  # for whoever asks again
        if step.error is not None:
            raise step.error
        return None

    def _next(self, is_filled: Callable[[], bool]) -> LoadedStep | _End:
        while True:
            alive = is_filled()  # before the look: what it put last is seen
            try:
                return self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                if not alive:  # it had no memory to say why
                    return _End(error=MemoryError("the thread that reads samples ahead has died"))

    def close(self) -> None:
        """Wake both sides, and let go of the steps that nobody takes any more."""
        self.closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(_End())
        self._room.put(None)


def fill(ahead: Ahead, steps: Iterator[LoadedStep]) -> None:
    """Read ahead for as long as somebody wants more: what the thread of a loader does."""
    error: BaseException | None = None
    try:
        while ahead.wait():
            step = next(steps, None)
            if step is None:
                break
            ahead.put(step)
    except BaseException as raised:
        error = raised
    ahead.end(error)
