"""Slow disks and links, clocks that jump, disks that refuse, all counted: a small library that is preloaded (`shim.c`).

In: a C compiler. Out: this process started again with the library in it, asleep; a page of memory says for which
sessions it wakes up, and what it does. Where there is no compiler, there is no `Shim`, and the caller says what it
skips.
"""

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

_PAGE, _READY = "PLAIT_CHAOS_PAGE", "PLAIT_CHAOS_SHIM"
_FIELDS = struct.Struct("<qqqqq")
"""Session, microseconds a write to disk, microseconds a message, seconds of the clock, how often it struck."""


NUM_SLOTS = 32
"""Of the page: runs that it can be awake for at a time, as in `shim.c`."""


class Shim:
    """One slot of the page."""

    def __init__(self, path: Path, slot: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NUM_SLOTS * _FIELDS.size)
        self._at = slot * _FIELDS.size

    @classmethod
    def of_this_process(cls, slot: int) -> "Shim | None":
        return cls(Path(os.environ[_PAGE]), slot) if os.environ.get(_READY) else None

    def set(self, *, session: int = 0, disk_us: int = 0, link_us: int = 0, clock_s: int = 0) -> None:
        """From now on, for that session; 0: for nobody."""
        _FIELDS.pack_into(self._memory, self._at, session, disk_us, link_us, clock_s, 0)

    @property
    def hits(self) -> int:
        """How often something was slowed, shifted or refused since `set`."""
        return int(_FIELDS.unpack_from(self._memory, self._at)[-1])


def start_again_with_it() -> Path | None:
    """Replace this process by itself with the library in it, once; returns its folder then, or None: no compiler."""
    if folder := os.environ.get(_READY):
        os.environ.pop("LD_PRELOAD", None)  # what runs start is not meant, and has no use for it
        return Path(folder)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return None
    place = Path(tempfile.mkdtemp(prefix="chaos-shim-"))
    library, page = place / "shim.so", place / "page"
    page.write_bytes(bytes(mmap.PAGESIZE))
    source = Path(__file__).with_name("shim.c")
    made = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=False)
    if made.returncode:
        shutil.rmtree(place)
        return None
    os.environ |= {"LD_PRELOAD": str(library), _PAGE: str(page), _READY: str(place)}
    return os.execv(sys.executable, [sys.executable, "-m", "bench.chaos", *sys.argv[1:]])
