"""What tasks on hosts of somebody else's cluster gave."""

import os
import signal

import cloudpickle
import pytest

from plait.errors import RunError
from plait.run.engines.host import Ended, HostTask, values_of


def test_values_by_rank_or_the_first_cause() -> None:
    right = Ended(task=0, code=0, said="", value=cloudpickle.dumps(3))
    assert values_of([right, right]) == [3, 3]
    follows = Ended(task=0, code=1, said="ConnectionError: rank 1 is lost", value=None)
    causes = Ended(task=1, code=1, said="ValueError: by itself", value=None)
    with pytest.raises(RunError, match="rank 1 ended with exit status 1:\nValueError: by itself"):
        values_of([follows, causes])
    with pytest.raises(RunError, match="rank 0 ended"):
        values_of([follows, right])


_WAITS = """
import time
print("begun", flush=True)
try:
    time.sleep(30)
except KeyboardInterrupt:
    print("asked", flush=True)
"""


@pytest.mark.timeout(60)
def test_a_task_hears_ctrl_c_though_the_thread_that_starts_it_does_not() -> None:
    """Ray's threads block it, and children inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        task = HostTask([], {}, None, os.getcwd(), _WAITS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    said, code = b"", None
    try:
        while b"begun" not in said:
            said += task.read(1.0)[0]
        task.signal(signal.SIGINT)
        while code is None:
            piece, code = task.read(1.0)
            said += piece
    finally:
        task.close()
    assert (said, code) == (b"begun\nasked\n", 0)
