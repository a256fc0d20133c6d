"""Files that are written whole or not at all.

In: a path and its content. Out: the file under its name, with everything in it on the disk; or an `OSError`, and what
was there before. It never leaves half a file under a name that somebody reads.
"""

import os
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside the file, wait for the disk, then take the file's place in one rename."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid4().hex[:8]}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
