"""What a dataset starts ends with the run, also where the run is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import forked
from tests.ranks import jobs

pytestmark = pytest.mark.timeout(60)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("ranks", [1, 2])
def test_helpers_of_a_killed_run_are_gone(ranks: int, tmp_path: Path) -> None:
    helpers = tmp_path / "helpers"
    helpers.mkdir()
    process = forked.plait(
        "run", jobs.reference("with_helper"), "--ranks", str(ranks), "--out", tmp_path / "run", "--no-trace",
        environment=os.environ | {"HELPERS": str(helpers)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 40
    while len(found := [path for path in helpers.iterdir() if path.read_text()]) < 2 * (
        1 if ranks == 1 else 3
    ):  # of each process that reads the data
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    pids = [int(path.read_text()) for path in found]
    assert all(map(is_running, pids))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a helper outlived the run"
        time.sleep(0.05)
