"""How a rank sleeps until something came for it, and notices who can no longer come.

In: what is waited for, as a question. Out: it holds, or an error that names the rank. Whoever writes something for
another rank rings its bell; without the compiled core a rank looks again and again, less and less often.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from plait.run.link.shm import core
from plait.run.link.shm.memory import Arena, has_ended

LOOK_S = 0.2
"""Between two looks whether the others are still alive: a death is told within a second."""
_YIELDS = 200
"""Looks without a compiled core before a rank that waits starts to sleep between looks."""
_LONGEST_SLEEP_S = 0.0005
"""Between two of those looks: the least that gloo takes for a kilobyte between two processes of a host."""


class Bells:
    """The bells of the ranks that share memory; this rank sleeps at its own."""

    def __init__(self, bells: Sequence[Tensor], own: int, *, native: bool) -> None:
        self._library = core.compiled() if native else None
        self._places = [ctypes.c_void_p(bell.data_ptr()) for bell in bells]
        self._own = own
        self._word = memoryview(bells[own].numpy()).cast("I")  # type: ignore[arg-type]

    def ring(self, rank: int) -> None:
        """Wake a rank for which something was written, where it sleeps."""
        if self._library is not None:
            self._library.plait_ring(self._places[rank])

    def until(self, is_over: Callable[[], bool], look: Callable[[float], None]) -> None:
        """Sleep until `is_over`; `look`, with the seconds so far, raises where it never will be."""
        if is_over():
            return
        if self._library is None:
            self._poll(is_over, look)
            return
        own, began_s, looked_s = self._places[self._own], time.monotonic(), 0.0
        self._library.plait_listen(own, ctypes.c_int32(1))
        try:
            while True:
                seen = self._word[0]
                if is_over():
                    return
                now_s = time.monotonic()
                if now_s - max(began_s, looked_s) >= LOOK_S:
                    looked_s = now_s
                    if _is_over_or(is_over, look, now_s - began_s):
                        return
                self._library.plait_sleep(own, ctypes.c_uint32(seen), ctypes.c_int64(int(LOOK_S * 1e6)))
        finally:
            self._library.plait_listen(own, ctypes.c_int32(-1))

    def _poll(self, is_over: Callable[[], bool], look: Callable[[float], None]) -> None:
        looks, began_s = 0, time.monotonic()
        looked_s = began_s
        while not is_over():
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
                continue
            time.sleep(min(_LONGEST_SLEEP_S, 1e-6 * (looks - _YIELDS + 10)))
            now_s = time.monotonic()
            if now_s - looked_s >= LOOK_S:
                looked_s = now_s
                if _is_over_or(is_over, look, now_s - began_s):
                    return


def _is_over_or(is_over: Callable[[], bool], look: Callable[[float], None], waited_s: float) -> bool:
    """Look; what a rank wrote before its end has come."""
    try:
        look(waited_s)
    except ConnectionError:
        if is_over():
            return True
        raise
    return False


def look_at(
    arenas: Sequence[Arena], names: Sequence[str], ranks: Sequence[int], what: str, timeout_s: float
) -> Callable[[float], None]:
    """For `Bells.until`: an error where all of the ranks that may come are gone, or it takes too long."""

    def look(waited_s: float) -> None:
        who = " or ".join(names[rank] for rank in ranks)
        if all(has_ended(arenas[rank].pid) for rank in ranks):
            raise ConnectionError(f"{what}: the process of {who} is gone.")
        if waited_s > timeout_s:
            raise ConnectionError(f"{what}: {who} did not come within {timeout_s:.0f} s: timed out.")

    return look
