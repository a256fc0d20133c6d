"""What a monitor of workers is told, and how it says that a person ended them."""

from dataclasses import dataclass
from typing import Any

from plait.run.start.watch import failure as launch_failure


class Interrupted(KeyboardInterrupt):
    """The run was stopped by Ctrl-C or SIGTERM; the workers were given time to save and return."""

    def __init__(self, *, number: int, results: list[Any], returned: bool) -> None:
        super().__init__(f"stopped by {launch_failure.signal_name(number)}")
        self.number = number
        """The signal."""
        self.results = results
        """What each rank returned, None where it did not."""
        self.returned = returned
        """Whether every rank returned by itself, so that what it saves at the end is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchLimits:
    """How long the monitor waits for what."""

    hang_s: float
    """A rank may wait this long for another."""
    grace_s: float
    """After the first Ctrl-C, workers may take this long to save and return."""
