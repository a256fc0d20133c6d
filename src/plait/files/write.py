"""Files that are written whole or not at all.

In: a path and its content. Out: the file under its name, with everything in it on the disk; or a `DiskError` with the
numbers, and what was there before. It never leaves half a file under a name that somebody reads. A folder may hold a
reserve, which is given up so that the last words of a run on a full disk still fit.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from plait.errors import DiskError
from plait.units import format_bytes

_RESERVE = ".reserve"
_RESERVE_BYTES = 64 << 10
"""Room for `failure.txt` and the stacks of a few ranks, 5 to 20 KiB each as seen."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside the file, wait for the disk, then take the file's place in one rename."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise cannot_write(path, error, len(data)) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_or_tell(write: Callable[[], object], tell: Callable[[str], object]) -> None:
    """Write something that a run can do without; where that fails, say so and go on."""
    try:
        write()
    except DiskError as error:
        tell(f"{error.what} The run does not depend on it.")


def cannot_write(path: Path, error: OSError, num_bytes: int) -> DiskError:
    """What is told of a write that failed."""
    reason, free = error.strerror or str(error), free_bytes(path.parent)
    room = (
        f"; it needs {format_bytes(num_bytes)} and {format_bytes(free)} is free" if free is not None else ""
    )
    return DiskError(
        f"{path} cannot be written: {reason}{room}.", fix="free space there, or write to another disk."
    )


def free_bytes(folder: Path) -> int | None:
    """Room on the disk of a folder, or of the one in which it is to be made; None: nobody knows."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def hold_reserve(folder: Path) -> None:
    """Take a little room now, for what is to be told should there be none later."""
    with suppress(OSError):
        (folder / _RESERVE).write_bytes(bytes(_RESERVE_BYTES))


def release_reserve(folder: Path) -> None:
    """Give the room back."""
    with suppress(OSError):
        (folder / _RESERVE).unlink(missing_ok=True)


def write_last_words(path: Path, text: str) -> None:
    """Write what became of a run, whole or not at all, if need be into the reserve; never an error of its own."""
    release_reserve(path.parent)
    with suppress(DiskError):
        write_whole(path, text)
