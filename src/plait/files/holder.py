"""Who writes to a run folder, or did when it ended: the text of its lock.

In: the folder. Out: process, host and time, and whether that process is gone. A run that comes to its end wipes the
text; one that fails or is killed leaves it.
"""

import os
import socket
from pathlib import Path

import msgspec

LOCK_NAME = "run.lock"
_READ_BYTES = 4096
"""A lock names a process, a host and a time: less than this."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a folder."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_dead(self) -> bool:
        """Whether that process is known to be gone: nothing is known of other hosts."""
        return self.host == socket.gethostname() and not is_alive(self.pid)


def holder_of(file: int) -> Holder | None:
    """What an open lock says."""
    try:
        return msgspec.json.decode(os.pread(file, _READ_BYTES, 0), type=Holder)
    except (msgspec.DecodeError, RecursionError, OSError):
        return None


def last_holder(folder: Path) -> Holder | None:
    """What a folder's lock says; None: nothing, or there is none."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return holder_of(file)
    finally:
        os.close(file)


def is_alive(pid: int) -> bool:
    """Whether a process of this host still does anything; one that has ended and was not asked for yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state not in "ZX"
