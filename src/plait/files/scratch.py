"""A folder for what is written for a while, gone with whoever made it; those of processes that were killed go with the
next.

In: nothing. Out: an empty folder for a block. While it is used it is locked, so that others of this user know that it
is; one that nobody locks is removed.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "plait-scratch-"
_LOCK = "scratch.lock"
_YOUNG_S = 60.0
"""A folder may stand unlocked for a moment after it was made."""


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """An empty folder, in `parent` or where programs keep such; removed afterwards."""
    place = parent or Path(tempfile.gettempdir())
    remove_abandoned(place)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        lock = os.open(Path(name) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove folders of this user that no living process has locked."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid != os.geteuid() or path.is_symlink() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
