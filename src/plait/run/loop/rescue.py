"""How a rank that waits for others hears that they are lost.

In: a signal of the parent. Out: an exception, in a wait that can be left; what must come to its end does.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from plait.run.start.child import LOST_SIGNAL


class Rescue:
    """Ends a wait that nobody ends any more."""

    def __init__(self) -> None:
        self.listens = False
        self._is_open = False
        """Whether this rank may be torn out of what it does."""
        self.is_asked = False
        """Whether the parent has said so."""

    def ignore(self) -> None:
        """Others hand over what there is."""
        signal.signal(LOST_SIGNAL, signal.SIG_IGN)

    def listen(self) -> None:
        """From here on the parent may say that ranks are lost."""
        signal.signal(LOST_SIGNAL, self._hear)
        self.listens = True

    def close(self) -> None:
        """What comes now must come to its end."""
        self._is_open = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For as long as others may be waited for; nothing in the block is lost that cannot be done again."""
        self._is_open = True
        try:
            self._check()
            yield
        finally:
            self._is_open = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if self._is_open:
            self._check()

    def _check(self) -> None:
        if self.is_asked:
            raise ConnectionError("other ranks are lost.")
