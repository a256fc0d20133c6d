"""The process beside a run that cleans up after it must not keep it."""

import os
import signal

import pytest

from plait.run.start.guardian import Guardian


@pytest.mark.timeout(30)
def test_a_guardian_that_was_stopped_does_not_keep_the_run() -> None:
    with Guardian() as guardian:
        assert guardian._process is not None
        os.kill(guardian._process.pid, signal.SIGSTOP)
    assert guardian._process.returncode == -signal.SIGKILL
