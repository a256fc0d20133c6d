"""Files that live in memory: what the processes of a run share by descriptor."""

import os
import tempfile


def anonymous_file(name: str) -> int:
    """Open a file that lives in memory and has no path; processes share it by its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())
