"""Threads that run, or an error.

In: a thread that was not started. Out: it runs; or a `RunError`. CPython's own `Thread.start` waits without a limit for
a thread that may have died of a lack of memory before it could say that it runs.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from plait.errors import RunError

_LOOK_S = 1.0
"""Between two looks at a thread that has not begun: short, for a process that was stopped meanwhile."""
_LOOKS = 10
"""Until it is given up."""
_WAITING = 20
"""Code that may compute for a second may wait for so many."""
_SOONEST_S = 0.05
"""Between two looks at how long code has computed."""
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
    """Leave Python code that takes more processor time than this by a `TooLongError`; a call into C is waited for.

    Its own time, not the clock's: what it computes must not depend on who else uses the machine.
    """
    caller, over, guard = threading.get_ident(), threading.Event(), threading.Lock()
    left = False
    now = _time_of(caller)
    ends, waits = now() + seconds, time.monotonic() + _WAITING * seconds

    def watch() -> None:
        nonlocal left
        while (more := ends - now()) > 0 and time.monotonic() < waits:
            if over.wait(max(more, _SOONEST_S)):
                return
        with guard:
            if not over.is_set():
                left = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(caller), ctypes.py_object(TooLongError)
                )

    start_thread(threading.Thread(target=watch, daemon=True))
    try:
        yield
    except TooLongError:
        raise TooLongError(f"it did not end in {seconds:g} s") from None
    finally:
        with guard:
            over.set()
        if left:  # it may not have been raised yet; the next line of this thread does so
            with suppress(TooLongError):
                time.sleep(0)


def _time_of(thread: int) -> Callable[[], float]:
    """The processor time that a thread has used; the clock's where the system does not tell."""
    if sys.platform == "linux":
        return partial(time.clock_gettime, time.pthread_getcpuclockid(thread))
    return time.monotonic
