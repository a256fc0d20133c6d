"""What asks a run to end: Ctrl-C, SIGTERM, and SIGUSR1, by which batch systems say that time is nearly up.

In: signals. Out: their count, where ranks run; else, in this process, a KeyboardInterrupt that does not get lost.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

_CTRL_C = 130
"""What shells make of Ctrl-C."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_OWN = str(Path(__file__).parents[3])
"""Where our own code is, in which an exception does no harm."""
_LOOK_S = 0.01
"""Between two looks whether that is where we are."""
_ELSEWHERE_S = 1.0
"""After which anything but torch will do, such as a dataset that takes its time."""
_ANYWHERE_S = 3.0
"""After which any code will do."""
_UNWIND_S = 2.0
"""For an exception to come out, before it is taken for lost."""


class Interrupts:
    """Counts signals instead of dying of them; outside of the main thread it sees none."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
            wish = getattr(self._previous[signal.SIGINT], "__self__", None)
            if isinstance(wish, _Wish) and wish.hand_over():
                self.count, self.number = 1, signal.SIGINT
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.count and number != signal.SIGINT:
            return  # Slurm and its srun both pass on one wish; only a person at the keyboard asks twice
        self.count += 1
        self.number = number

    def note_once(self, number: int) -> None:
        """Another task was asked to end: the same wish, not a second one."""
        if not self.count:
            self._note(number, None)


@contextmanager
def raised_in_safety() -> Iterator[None]:
    """Have Ctrl-C end what is within, soon, whatever it does.

    Python raises a KeyboardInterrupt wherever it happens to be. Within torch that may abort the process, and in a
    callback that nobody hears of it is dropped. So it is raised in our own code, which is seldom far, and again where
    it does not come out; while torch is being imported, the process ends at once. A second Ctrl-C is raised at once.
    Where somebody else listens to Ctrl-C nothing is changed.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    wish = _Wish()
    signal.signal(signal.SIGINT, wish.hear)
    try:
        yield
    finally:
        wish.close()
        if signal.getsignal(signal.SIGINT) == wish.hear:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _Wish:
    """That this process should end: it is asked again and again, until it does."""

    def __init__(self) -> None:
        self._is_over = False
        self._since_s: float | None = None
        self._raised_s = float("-inf")
        self._is_asking = False
        self._asks = False
        """Whether the signal that comes is our own."""
        self._main = threading.get_ident()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Of Ctrl-C, in the main thread, between two operations of `frame`."""
        ours, self._asks = self._asks, False
        now_s = time.monotonic()
        if _is_half_imported("torch"):
            end_at_once()
        if self._is_over:
            return
        if self._since_s is None:
            self._since_s = now_s
            self._is_asking = True
            try:  # not by `threading`, whose locks the main thread may hold just now
                _thread.start_new_thread(self._ask, ())
            except RuntimeError:
                self._is_asking = False
                self._raise(now_s)
        if (not ours and now_s > self._since_s) or _may_raise(frame, now_s - self._since_s):
            self._raise(now_s)

    def hand_over(self) -> bool:
        """Whether Ctrl-C was heard and what it raised has not come out; who asks sees to it from here on."""
        heard, self._since_s = self._since_s is not None, None
        self._stop_asking()
        return heard

    def close(self) -> None:
        """It has ended."""
        self._is_over = True
        self._stop_asking()

    def _stop_asking(self) -> None:
        while self._is_asking:  # or its signal would come to somebody else
            time.sleep(_LOOK_S / 10)

    def _raise(self, now_s: float) -> None:
        self._raised_s = now_s
        raise KeyboardInterrupt

    def _ask(self) -> None:
        while not self._is_settled():
            time.sleep(_LOOK_S)
            if not self._is_settled() and time.monotonic() - self._raised_s > _UNWIND_S:
                self._asks = True
                signal.pthread_kill(self._main, signal.SIGINT)
        self._is_asking = False

    def _is_settled(self) -> bool:
        return self._is_over or self._since_s is None


def end_at_once(*_: object) -> NoReturn:
    """Where nothing was begun, and an exception would be one too many: say so, and be gone."""
    os.write(2, b"interrupted\n")
    os._exit(_CTRL_C)


def _is_half_imported(name: str) -> bool:
    """Whether a module is being imported: of some, an exception then leaves what cannot be used or undone."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _may_raise(frame: FrameType | None, waited_s: float) -> bool:
    file = frame.f_code.co_filename if frame is not None else _OWN
    if file.startswith(_OWN) or waited_s > _ANYWHERE_S:
        return True
    library = sys.modules.get("torch")
    is_torch = library is not None and file.startswith(str(Path(library.__file__ or "").parent))
    return waited_s > _ELSEWHERE_S and not is_torch and "importlib" not in file
