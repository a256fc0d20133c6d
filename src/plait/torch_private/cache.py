"""Where torch keeps what it compiles, and reads how it is to trace.

In: the environment. Out: a folder of this user's alone, which the environment names from then on. Torch's own place is
a folder of a known name for all to write to, /tmp: whoever makes it first has his code run, or ends every program that
traces, for torch makes the folder when it is imported.
"""

import atexit
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_NAME = "TORCHINDUCTOR_CACHE_DIR"


def own_cache() -> Path:
    """The folder that the user has named; else one that nobody else can write to, made at its first use."""
    named = os.environ.get(_NAME)
    if named is None or Path(named) == _torchs_own():
        named = os.environ[_NAME] = str(_private_folder())
    return Path(named)


@contextmanager
def alone(key: str) -> Iterator[None]:
    """While active, no other process of this host compiles what has this key; who comes later finds it compiled."""
    with _lock_file(key) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel takes it back from a process that dies
        yield


@dataclass(frozen=True, slots=True)
class Claim:
    """That this process, and no other of this host, has something done."""

    said: str | None
    """What the one said who has done it before; None: nobody has."""
    _file: IO[bytes]

    def release(self, said: str | None = None) -> None:
        """Give it up; where it is done, with something to say to all who come later."""
        if said is not None:
            self._file.write(said.encode())
            self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_UN)  # whoever was forked meanwhile has it open still
        self._file.close()


def claim(key: str) -> Claim | None:
    """The claim to do what has this key; None where another process has it."""
    file = _lock_file(f"{key}-claim")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.seek(0)
    return Claim(file.read().decode() or None, file)


def _lock_file(key: str) -> IO[bytes]:
    folder = own_cache() / "plait-locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open(folder / key, "a+b")


def _torchs_own() -> Path | None:
    """The place that torch takes by itself, and puts into the environment; None: it has not looked for one yet."""
    module = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return None if module is None else Path(module.default_cache_dir())


def _private_folder() -> Path:
    folder = Path.home() / ".cache" / "plait" / "inductor"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:  # no home, or none to write to
        pass
    made = Path(tempfile.mkdtemp(prefix="plait-inductor-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
