"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of `prctl` on Linux: a signal when the parent dies."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone, however it went.

    The kernel means the thread that forked it: that one must live as long as the process is to.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
