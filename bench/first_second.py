"""What the command line says at once, each under a second: help, the version, what can be refused without torch.

`python -m bench.first_second` prints the best of three for every command line and exits 1 where one is slower.
"""

import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 1.0
"""For each of them, from the start of the process to its end."""
HERE = Path(__file__).parent
COMMANDS = (
    "--help", "--version", "run --help", "plan --help", "run nowhere.py", f"run {HERE / 'start_up.py'} --plan fly",
    f"verify {HERE / 'start_up.py'} --plan dpp", f"predict {HERE / 'start_up.py'} --mesh data", "report nowhere",
    "run --resume nowhere", "run --ranks two", "fly",
)  # fmt: skip


def best_s(arguments: list[str]) -> float:
    """The shortest of three."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", "from plait.cli.main import main; main()", *arguments],
            capture_output=True,
            check=False,
        )
        found.append(time.perf_counter() - began)
        assert done.returncode in (0, 2), done.stderr.decode()
    return min(found)


if __name__ == "__main__":
    times = {command: best_s(command.split()) for command in COMMANDS}
    for command, seconds in times.items():
        print(f"{seconds:6.2f} s  plait {command}")
    sys.exit(any(seconds >= LIMIT_S for seconds in times.values()))
