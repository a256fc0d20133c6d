"""Tasks of one run as an engine starts them: processes with a place in their environment, each a host of its own."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLAIT = (sys.executable, "-c", "from plait.cli.main import main; main()")
"""The command line, of the source that is tested."""


def environment(**more: str) -> dict[str, str]:
    """Without what another engine may have left."""
    path = f"{ROOT / 'src'}:{ROOT}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_"))}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more


def start_tasks(
    command: Sequence[str | Path],
    tasks: int,
    cwd: Path,
    *,
    differing: Sequence[Sequence[str]] = (),
    **more: str,
) -> list[subprocess.Popen[str]]:
    """The same command on `tasks` hosts, plus what differs; in sessions of their own, which are killed with them."""
    shared = {
        "PLAIT_TASKS": str(tasks), "PLAIT_FIRST_ADDRESS": "127.0.0.1", "PLAIT_RUN_ID": uuid.uuid4().hex,
        "PLAIT_TOKEN": uuid.uuid4().hex,
    }  # fmt: skip
    return [
        subprocess.Popen(
            [*map(str, command), *(differing[task] if differing else ())],
            cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=environment(**shared, PLAIT_TASK=str(task), PLAIT_HOST=f"host{task}", **more),
        )
        for task in range(tasks)
    ]  # fmt: skip


def ended(tasks: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str, str]]:
    """(exit status, what was said, what was complained of) of each; nobody is left."""
    found = []
    try:
        for task in tasks:
            out, err = task.communicate(timeout=timeout_s)
            found.append((task.returncode, out, err))
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
                task.wait()
    return found
