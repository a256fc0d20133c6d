"""Forty faults at random moments, over all plans: see `bench/chaos/`. Any number can be tried by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.skipif(sys.platform != "linux", reason="faults are made through /proc and prlimit")
def test_forty_faults() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "bench.chaos", "--faults", "40", "--seed", "13", "--side-by-side", "4"],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=1780,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert "40 of 40 held" in found.stdout
