"""Where plait is installed, torch knows its backend, whichever of the two is imported first."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

CHECK = "import torch.distributed as dist; assert 'plait_shm' in dist.Backend.backend_list"


@pytest.mark.parametrize("first", ["import plait.shm", "import plait; plait.shm", "import torch"])
def test_the_backend_is_known_whatever_is_imported_first(first: str) -> None:
    if first == "import torch" and "plait_shm" not in entry_points(group="torch.backends").names:
        pytest.skip("plait is not installed here, only imported")
    done = subprocess.run(
        [sys.executable, "-c", f"{first}; {CHECK}"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
