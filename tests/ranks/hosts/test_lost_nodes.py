"""A real Slurm of two nodes, of which the first one is lost, with the batch script of an elastic job on it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from examples.lectures.slurm import NoSlurmError, two_nodes
from tests.ranks import jobs
from tests.ranks.hosts.hosts import PLAIT, environment

from plait.files.records import read_records
from plait.run.checkpoint.store import load_checkpoint

pytestmark = [
    pytest.mark.timeout(520),
    pytest.mark.skipif(
        "PLAIT_LOST_NODES" not in os.environ,
        reason="minutes: Slurm holds back a job that it requeues; PLAIT_LOST_NODES=1 runs it",
    ),
]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch finds a Slurm of two nodes."""
    (tmp_path / "slurm").mkdir()
    try:
        with two_nodes(tmp_path / "slurm", environment()) as found:
            yield found
    except NoSlurmError as error:
        pytest.skip(str(error))


def _lose(node: bytes, configuration: str) -> None:
    """As if its power was gone: slurmd and those who watch steps there, who would tell of it; then all tasks."""
    mark, place = f"SLURM_CONF={configuration}".encode(), b"SLURMD_NODENAME=" + node
    daemons, tasks = [], []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            given = (process / "environ").read_bytes().split(b"\0")
            if mark in given and place in given:
                tasks.append(int(process.name))
                above = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if Path(f"/proc/{above}/comm").read_text().startswith("slurmstepd"):
                    daemons.append(int(above))
            elif mark in given and (process / "cmdline").read_bytes() == b"slurmd\0-D\0-N\0" + node + b"\0":
                daemons.append(int(process.name))
    assert daemons and tasks
    for pid in dict.fromkeys([*daemons, *tasks]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_an_elastic_job_whose_first_node_is_lost_goes_on_by_itself(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """Slurm keeps it as running, with nothing in it: the task that is left hands on what it holds and asks for more."""
    out = tmp_path / "run"
    run = ["run", jobs.reference("slow"), "--plan", "ddp", "--ranks", "2", "--elastic", "1:2", "--no-trace"]
    steps = ["--steps", "300", "--record-samples", "--checkpoint-every", "100000", "--out", str(out)]
    with (tmp_path / "said").open("w") as said:
        following = subprocess.Popen(
            [*PLAIT, *run, *steps, "--engine", "slurm", "--hosts", "2"], env=slurm, cwd=tmp_path,
            stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        while not (out / "metrics.jsonl").exists() or '"step": 8,' not in (out / "metrics.jsonl").read_text():
            assert following.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        _lose(b"n0", slurm["SLURM_CONF"])
        down = ["scontrol", "update", "nodename=n0", "state=down", "reason=lost"]
        subprocess.run(down, env=slurm, check=True)
        code = following.wait(480)
    finally:
        following.kill()
        following.wait()
    told = (tmp_path / "said").read_text()
    assert code == 0 and load_checkpoint(out).step == 300, told
    entries = [entry for entry in read_records(out / "samples.jsonl").entries if "ids" in entry]
    assert [entry["step"] for entry in entries] == list(range(300)), (
        told
    )  # nothing is repeated: it was handed on
