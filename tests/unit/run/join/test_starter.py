"""A task knows the engine's process by its environment, and that it is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

_TASK = """
import sys
from plait.run.join.starter import Starter
starter = Starter.find("MARK")
print(*starter.line, flush=True)
for _ in sys.stdin:
    print(starter.is_gone(), flush=True)
"""
_ENGINE = f"""
import os, subprocess, sys
task = ["sh", "-c", '"$0" "$@"; true', sys.executable, "-c", {_TASK!r}]
subprocess.Popen(task, env=os.environ | {{"MARK": "1"}}).wait()
"""
_ABOVE = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-S', '-c', {_ENGINE!r}]).wait()"
_ENDS = """
import subprocess, sys, time
from plait.run.join.starter import end_with_starter
end_with_starter("MARK", asks=False, told="the task ends")
print("begun", flush=True)
time.sleep(600)
"""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.timeout(120)
def test_a_shell_in_between_is_no_engine_and_what_is_above_it_may_go() -> None:
    above = subprocess.Popen(
        [sys.executable, "-S", "-c", _ABOVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert above.stdin is not None and above.stdout is not None
    with above.stdin as asks, above.stdout as says:

        def is_gone() -> bool:
            asks.write("\n")
            asks.flush()
            return says.readline() == "True\n"

        task, shell, engine = map(int, says.readline().split())
        assert (_parent(shell), _parent(engine)) == (engine, above.pid)
        assert not is_gone()
        above.kill()
        above.wait()
        _wait(lambda: _parent(engine) != above.pid)
        assert not is_gone()
        os.kill(engine, signal.SIGKILL)
        _wait(lambda: _parent(shell) != engine)
        assert is_gone()
    _wait(lambda: _parent(task) == -1)


@pytest.mark.timeout(120)
def test_a_task_ends_with_what_started_it() -> None:
    engine = subprocess.Popen(
        [sys.executable, "-S", "-c", _ENGINE.replace(repr(_TASK), repr(_ENDS))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert engine.stdout is not None and engine.stderr is not None
    with engine.stdout as says, engine.stderr as complains:
        assert says.readline() == "begun\n"
        engine.kill()
        engine.wait()
        assert complains.readline() == "the task ends\n"
        assert says.read() == ""  # nobody is left who could write
