"""Programs that are run to their end, and nobody waits for longer than was said."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from plait import processes
from plait.processes import run_program


def test_what_a_program_says_and_how_it_ends() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_program([sys.executable, "-S", "-c", code], patience_s=60)
    assert (done.status, done.out, done.err) == (3, "out\n", "err\n")


def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program is not installed here"):
        run_program(["no-such-program"], patience_s=1)


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    for patience_s in (0.5, 5.0, 20.0):  # a loaded machine may not come to the note in the first
        with pytest.raises(TimeoutError, match=f"sh did not end within {patience_s:g} s"):
            run_program(["sh", "-c", f"sleep 600 & echo $! > {note}; wait"], patience_s=patience_s)
        if note.exists() and note.read_text().endswith("\n"):
            break
    state = Path(f"/proc/{int(note.read_text())}/stat")
    for _ in range(500):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX":
            return
        time.sleep(0.02)
    pytest.fail("what it started was left")


def test_a_program_that_is_stopped_before_it_runs_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork = processes.fork

    def fork_and_stop() -> int:
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return pid

    monkeypatch.setattr(processes, "fork", fork_and_stop)
    with pytest.raises(TimeoutError):
        run_program(["true"], patience_s=0.2)
