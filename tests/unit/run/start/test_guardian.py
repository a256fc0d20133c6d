"""The process beside a run that cleans up after it: it must not keep the run, and leaves nothing of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import stopping

from plait.run.start.guardian import _CODE, Guardian


@pytest.mark.timeout(30)
def test_a_guardian_that_was_stopped_does_not_keep_the_run() -> None:
    with Guardian() as guardian:
        os.kill(guardian._pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(guardian._pid, 0)


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
def test_a_guardian_that_was_stopped_before_it_runs_does_not_keep_the_run(tmp_path: Path) -> None:
    code = (
        "from plait.run.start.guardian import Guardian\nwith Guardian() as beside:\n    beside.watch(1 << 22)\n"
        "print('the run went on')"
    )
    done = stopping.run(code, tmp_path, timeout_s=40)
    assert (done.returncode, done.stdout) == (0, "the run went on\n"), done.stderr


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
