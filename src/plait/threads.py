"""Threads that run, or an error.

In: a thread that was not started. Out: it runs; or a `RunError`. CPython's own `Thread.start` waits without a limit for
a thread that may have died of a lack of memory before it could say that it runs.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plait.errors import RunError

_LOOK_S = 1.0
"""Between two looks at a thread that has not begun: short, for a process that was stopped meanwhile."""
_LOOKS = 10
"""Until it is given up."""
MEMORY_FIX = (
    "leave it more memory (ulimit -v, a container's limit), or raise its limit of threads (ulimit -u)."
)

NO_MEMORY_STATUS = 71
"""Exit status of a rank that had no memory left to say so: what sysexits.h calls a failure of the system."""


class _Begun(threading.Event):
    """What `Thread.start` waits for, with an end."""

    def __init__(self) -> None:
        super().__init__()
        self._before = _tasks()

    def wait(self, timeout: float | None = None) -> bool:
        for _ in range(_LOOKS):
            if super().wait(_LOOK_S):
                return True
            if self._before and _tasks() <= self._before and not self.is_set():
                break  # it is gone already
        raise RunError(
            "a thread was made but did not begin: this process has no memory left.", fix=MEMORY_FIX
        )


def _tasks() -> set[str]:
    """The system's names of all threads of this process; empty where it does not tell."""
    return set(os.listdir("/proc/self/task")) if sys.platform == "linux" else set()


def start_thread(thread: threading.Thread) -> None:
    """Start it; returns when it runs."""
    vars(thread)["_started"] = _Begun()
    try:
        thread.start()
    except RuntimeError as error:
        raise RunError(
            f"no thread could be started ({error}): no memory, or too many threads.", fix=MEMORY_FIX
        ) from error


def or_end_the_rank(work: Callable[[], None]) -> Callable[[], None]:
    """The work of a thread without which a rank cannot go on: where it has no memory left, the process ends at once.

    Whoever waits for that thread would otherwise wait for ever; to end takes no memory.
    """

    def run() -> None:
        try:
            work()
        except MemoryError:
            os._exit(NO_MEMORY_STATUS)

    return run


class TooLongError(Exception):
    """Code did not come to its end in time."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Leave Python code that does not end in so many seconds by a `TooLongError`; a call into C is waited for."""
    caller, guard, done = threading.get_ident(), threading.Lock(), False

    def leave() -> None:
        with guard:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(caller), ctypes.py_object(TooLongError)
                )

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    except TooLongError:
        raise TooLongError(f"it did not end in {seconds:g} s") from None
    finally:
        with guard:
            done = True
        timer.cancel()
