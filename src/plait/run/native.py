"""Build and find the compiled core of shared memory.

In: `core.c`, a C compiler. Out: `libplaitcore.so` beside it, or nothing where there is no compiler: then
`core` is in Python. It needs no torch, as the wheel is built with it.
"""

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("link") / "core.c"
_VERSION = 2
"""Of the calls; a library of another version is left alone."""


def build(library: Path) -> bool:
    """Compile; whether there is a library now. `CC` names another compiler."""
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return False
    made = library.with_name(f"{library.name}.{os.getpid()}")
    command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    os.replace(made, library)
    return True


def library() -> Path:
    """Where the library is looked for."""
    return SOURCE.with_name("libplaitcore.so")


def load(path: Path) -> ctypes.CDLL | None:
    """The library; None where there is none that fits."""
    try:
        found = ctypes.CDLL(str(path))
        found.plait_version.restype = ctypes.c_int64
        return found if found.plait_version() == _VERSION else None
    except (OSError, AttributeError):
        return None


@cache
def compiled() -> ctypes.CDLL | None:
    """The compiled core, where there is one."""
    return load(library())


if __name__ == "__main__":
    print(f"built {library()}" if build(library()) else "no C compiler that works: links stay in Python")
