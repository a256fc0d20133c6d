"""Files that are written whole or not at all.

In: a path and its content. Out: the file under its name, with everything in it on the disk; or a `DiskError` with the
numbers, and what was there before. It never leaves half a file under a name that somebody reads. A folder may hold a
reserve, which is given up so that the last words of a run on a full disk still fit.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from plait.errors import DiskError
from plait.units import format_bytes

_RESERVE = ".reserve"
_RESERVE_BYTES = 64 << 10
"""Room for `failure.txt` and the stacks of a few ranks, 5 to 20 KiB each as seen."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Where numbers help: of the disk, of what a user may have of it, of one file."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Write beside the file, wait for the disk, then take the file's place in one rename."""
    data = _bytes_of(content)
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


def _bytes_of(content: str | bytes | memoryview) -> bytes | memoryview:
    """Names of files that are no text in this locale stay the bytes that they are."""
    return content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content


def write_named(path: Path, content: str | bytes) -> None:
    """The same, where a person has said to write: through a link, and into a pipe or a device as it comes."""
    real = path.resolve()
    if not real.exists() or real.is_file():
        return write_whole(real, content)
    data = _bytes_of(content)
    try:
        real.write_bytes(data)
    except OSError as error:
        raise cannot_write(path, error, len(data)) from error


def write_or_tell(write: Callable[[], object], tell: Callable[[str], object]) -> None:
    """Write something that a run can do without; where that fails, say so and go on."""
    try:
        write()
    except DiskError as error:
        tell(f"{error.what} The run does not depend on it.")


def cannot_write(path: Path, error: OSError, num_bytes: int) -> DiskError:
    """What is told of a write that failed."""
    reason, fix = why_not_written(path.parent, error, num_bytes)
    return DiskError(f"{path} cannot be written: {reason}.", fix=fix)


def why_not_written(folder: Path, error: Exception, num_bytes: int) -> tuple[str, str]:
    """Why a write to a folder failed, with the numbers where there was no room, and what can be done about it."""
    reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    told = _OS_ERROR.search(reason)  # libraries in Rust
    number = getattr(error, "errno", None) or (int(told[1]) if told is not None else None)
    if number is not None and number not in NO_ROOM:
        return reason, "see what became of that disk or folder, or write to another one."
    free = free_bytes(folder)
    if number is None and free is not None and free < num_bytes:
        reason = os.strerror(errno.ENOSPC)  # torch only tells that a file is shorter than it should be
    room = "an unknown part" if free is None else format_bytes(free)
    needs = f"{reason}; it needs {format_bytes(num_bytes)} and {room} is free"
    return needs, "free space there, or write to another disk."


def ordinary(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a file; an OSError where it is a pipe, at whose end nobody may be, or a device without an end."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no ordinary file")
    return file


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """A file to write to, at this very place, made with `mode` where there is none. A folder that was handed over may
    hold a link to another file of this user instead: an OSError that says so."""
    try:
        return ordinary(path, flags | os.O_CREAT | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"it is a link to {os.readlink(path)}") from None
        raise


def open_to_append(path: Path) -> int:
    """The same, for records; a `DiskError` where it cannot be."""
    try:
        return open_own(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        raise cannot_write(path, error, 0) from error


def add_to(path: Path, data: bytes) -> None:
    """Add to a file at this very place."""
    with os.fdopen(open_to_append(path), "wb", buffering=0) as file:
        try:
            file.write(data)
        except OSError as error:
            raise cannot_write(path, error, len(data)) from error


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
    with suppress(OSError), open(open_own(folder / _RESERVE, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(bytes(_RESERVE_BYTES))


def release_reserve(folder: Path) -> None:
    """Give the room back."""
    with suppress(OSError):
        (folder / _RESERVE).unlink(missing_ok=True)


def write_last_words(path: Path, text: str) -> None:
    """Write what became of a run, whole or not at all, if need be into the reserve; never an error of its own."""
    release_reserve(path.parent)
    with suppress(DiskError):
        write_whole(path, text)
