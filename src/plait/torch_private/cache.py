"""Where torch keeps what it compiles, and reads how it is to trace.

In: the environment. Out: a folder of this user's alone, which the environment names from then on. Torch's own place is
a folder of a known name for all to write to, /tmp: whoever makes it first has his code run, or ends every program that
traces, for torch makes the folder when it is imported.
"""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

_NAME = "TORCHINDUCTOR_CACHE_DIR"


def own_cache() -> Path:
    """The folder that the user has named; else one that nobody else can write to, made at its first use."""
    named = os.environ.get(_NAME)
    if named is None or Path(named) == _torchs_own():
        named = os.environ[_NAME] = str(_private_folder())
    return Path(named)


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
