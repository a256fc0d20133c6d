"""Naming the first cause when workers fail.

In: what each failed rank sent before it ended, or how the system says that it died, and the board. Out: one
exception that tells the first failure and nothing of its echoes on other ranks. It never ends a process.
"""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, RunError, WorkerError
from plait.run.start.board import Entry
from plait.threads import MEMORY_FIX, NO_MEMORY_STATUS

_OOM_COUNTERS = (
    "/proc/vmstat",
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    """The rank."""
    at_ns: int
    """When it raised, or when its end was seen, on the host's monotonic clock."""
    told: Mapping[str, Any] | None
    """What it sent (`launch_child.describe`); None where it could not."""
    exit_code: int | None
    """Its exit status, negative for a signal; None where it is not known yet."""
    stack: str
    """The Python stack that it left when it crashed, if any."""
    host: str = ""
    """Where it was; empty for this host."""
    lost: str | None = None
    """How it was lost where that is no matter of its own: its host does not answer."""

    @property
    def is_communication(self) -> bool:
        """It lost contact to another rank, so the cause may lie there."""
        return self.told is not None and bool(self.told["communication"])

    @property
    def is_timeout(self) -> bool:
        """It gave up waiting for another rank."""
        return self.told is not None and bool(self.told["timeout"])


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Choose the earliest failure, but one of communication only where there is no other: those are echoes."""
    return min(failures, key=lambda failure: (failure.is_communication, failure.at_ns))


def to_error(failure: Failure, entry: Entry | None, ranks: int, oom_kills: int) -> PlaitError:
    """Make the exception that the caller sees."""
    told = failure.told
    if told is not None and "classes" in told:
        return revive(told)
    place = entry.place() if entry is not None else "at an unknown place"
    who = f"rank {failure.rank} of {ranks}" + (f" on {failure.host}" if failure.host else "")
    if failure.lost is not None:
        return WorkerError(f"{who} is lost ({place}): {failure.lost}.", rank=failure.rank)
    if told is not None:
        text = f"{who} failed ({place}):\n{told['traceback']}"
        return WorkerError(text, rank=failure.rank, traceback=told["traceback"])
    stack = f"\n{failure.stack}" if failure.stack else ""
    code = failure.exit_code or 0
    if code == NO_MEMORY_STATUS:
        return WorkerError(
            f"{who} ended with exit status {code}: it had no memory left ({place}).{stack}",
            rank=failure.rank,
            traceback=failure.stack or None,
            fix=MEMORY_FIX,
        )
    if code >= 0:
        return WorkerError(
            f"{who} ended with exit status {code} and no result ({place}).{stack}",
            rank=failure.rank,
            traceback=failure.stack or None,
            fix="look for os._exit, or a library that ends the process, in what the rank ran.",
        )
    return WorkerError(
        f"{who} was killed by {signal_name(-code)} ({place}).{stack}",
        rank=failure.rank,
        traceback=failure.stack or None,
        fix=_memory_hint(oom_kills) if -code == signal.SIGKILL else None,
    )


def _memory_hint(oom_kills: int) -> str:
    if oom_kills > 0:
        return (
            f"the system ran out of memory (its out-of-memory killer struck {oom_kills} time(s) during this run): "
            "use a smaller batch, more accumulation, or fewer ranks on this host."
        )
    return (
        "somebody sent the signal, or the system ran out of memory (its counters show no out-of-memory kill, "
        "but may not be readable here): if it was memory, use a smaller batch or more accumulation."
    )


def signal_name(number: int) -> str:
    """Name a signal: SIGKILL, SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count_oom_kills() -> int:
    """Read how often the kernel has killed for lack of memory, as far as this process may see."""
    highest = 0
    for path in _OOM_COUNTERS:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                highest = max(highest, int(value))
    return highest


def revive(told: Mapping[str, Any]) -> PlaitError:
    """A plait error as it was raised; any other as a `RunError` with its traceback."""
    if "classes" not in told:
        return RunError(str(told["traceback"]))
    known = {kind.__name__: kind for kind in _family(PlaitError)}
    kind = next(known[name] for name in told["classes"] if name in known)
    error = kind.__new__(kind)
    Exception.__init__(error, told["what"])
    error.__dict__.update(told["fields"])
    return error


def _family(kind: type[PlaitError]) -> list[type[PlaitError]]:
    return [kind, *(member for child in kind.__subclasses__() for member in _family(child))]
