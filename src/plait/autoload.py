"""What torch calls while it is imported, where plait is installed: it makes `plait_shm` known to torch.distributed.

It imports plait.shm only where nobody has begun to: a program that imports that first is still at it, and torch with
it, when torch calls.
"""

import sys
from importlib import import_module


def register() -> None:
    """Make the backend known; what is being imported does so by itself at its end."""
    if "plait.shm" not in sys.modules:
        import_module("plait.shm").register()
