"""One writer a run folder.

In: a folder. Out: its lock, held by this process and by the ranks that it forks until the last of them is gone; or a
`UsageError` that names who holds it. The kernel keeps the lock (`flock`), so that of a dead holder is free; the text in
the file only says who it was. Whoever can read a file can lock it: who may not write to it may not read it either.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.errors import UsageError
from plait.files.holder import LOCK_NAME, holder_of
from plait.files.write import cannot_write, open_own

_LEFT_S = 10.0
"""For the ranks of a run whose parent was killed to be gone, as is promised, and more."""
_MODE = 0o622
"""Of a lock that is made, less what the umask takes: at no moment can somebody read it who may not write to it."""
_LOOK_S = 0.01
"""Between two looks."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for the block; nobody else may write to it meanwhile."""
    path = folder / LOCK_NAME
    try:
        file = open_own(path, os.O_RDWR, _MODE)
        _keep_to_writers(file)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be locked: {path.name}: {error.strerror}.",
            fix="choose a folder that you may write to.",
        ) from error
    try:
        try:
            _take(file)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(
                    f"{folder} is being written to by {holder_of(file) or 'another run'}.",
                    fix="wait until that run has ended, stop it, or choose another folder with --out.",
                ) from None
            # A file system without locks: one writer is then a matter of care, as docs/guarantees.md says.
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        text = json.dumps(holder).encode() + b"\n"
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, text, 0)
        except OSError as error:
            raise cannot_write(path, error, len(text)) from error
        yield
        with suppress(OSError):  # a disk that turned read-only: the lock goes all the same
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def _keep_to_writers(file: int) -> None:
    """Let those read the lock who may write to it, and nobody else."""
    status = os.fstat(file)
    writers = status.st_mode & 0o222
    if status.st_uid == os.geteuid():
        with suppress(OSError):  # a file system without modes
            os.fchmod(file, writers | writers << 1)


def _take(file: int) -> None:
    """Lock it; where its holder was killed, once the ranks that it had are gone too."""
    deadline_s = time.monotonic() + _LEFT_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder_of(file)
            if time.monotonic() > deadline_s or holder is None or not holder.is_dead:
                raise
            time.sleep(_LOOK_S)
