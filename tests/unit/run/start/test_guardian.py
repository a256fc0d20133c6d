"""The process beside a run that cleans up after it: it must not keep the run, and leaves nothing of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from plait.run.start.guardian import _CODE, Guardian


@pytest.mark.timeout(30)
def test_a_guardian_that_was_stopped_does_not_keep_the_run() -> None:
    with Guardian() as guardian:
        assert guardian._process is not None
        os.kill(guardian._process.pid, signal.SIGSTOP)
    assert guardian._process.returncode == -signal.SIGKILL


def test_a_process_that_is_born_late_is_ended_too() -> None:
    mark = f"PLAIT_RUN={os.getpid()}-late"
    becomes = f"os.execve('/bin/sleep', ['sleep', '60'], {{'PLAIT_RUN': {mark.partition('=')[2]!r}}})"
    late = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"import os, time; time.sleep(0.3); {becomes}"]
    )
    other = subprocess.Popen(["/bin/sleep", "60"])
    try:
        beside = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, mark],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert beside.stdin is not None
        beside.stdin.close()
        assert late.wait(20) == -9
        assert beside.wait(20) == 0
        time.sleep(0.05)
        assert other.poll() is None, "what has no mark is left alone"
    finally:
        for process in (late, other):
            process.kill()
            process.wait()
