"""A real Slurm of two nodes, of which the first one is lost, or what runs there: the batch script of an elastic job."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from examples.lectures.slurm import NoSlurmError, two_nodes
from tests.ranks import jobs
from tests.ranks.hosts.hosts import PLAIT, environment

from plait.files.records import read_records
from plait.run.checkpoint.store import load_checkpoint

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch finds a Slurm of two nodes."""
    (tmp_path / "slurm").mkdir()
    try:
        with two_nodes(tmp_path / "slurm", environment()) as found:
            yield found
    except NoSlurmError as error:
        pytest.skip(str(error))


def _processes(configuration: str) -> Iterator[tuple[int, str, int]]:
    """What runs on the first node: each process, its name, and the one that started it."""
    wanted = {f"SLURM_CONF={configuration}".encode(), b"SLURMD_NODENAME=n0"}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                above = (process / "stat").read_text().rpartition(")")[2].split()[1]
                yield int(process.name), (process / "comm").read_text().strip(), int(above)


def _kill(pids: Iterable[int]) -> None:
    """As if all ended at once. None may see another one gone: srun, and a child that it has for that, would ask Slurm
    to kill every task. So all are stopped first, and killed from the last one to the first: where those who started
    them end before, the kernel wakes the others up."""
    found = sorted(pids)
    for number, order in ((signal.SIGSTOP, found), (signal.SIGKILL, reversed(found))):
        for pid in order:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _lose_power(slurm: dict[str, str]) -> None:
    """Tasks, the batch script, and slurmd with those who watch steps there, who would tell of it."""
    found = list(_processes(slurm["SLURM_CONF"]))
    above = {parent for _, _, parent in found}
    watch = [pid for pid in above if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")]
    place = f"SLURM_CONF={slurm['SLURM_CONF']}".encode()
    daemon = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _read(process / "cmdline") == b"slurmd\0-D\0-N\0n0\0" and place in _read(process / "environ")
    ]
    assert watch and daemon
    _kill([*daemon, *watch, *(pid for pid, _, _ in found)])
    down = ["scontrol", "update", "nodename=n0", "state=down", "reason=lost"]
    subprocess.run(down, env=slurm, check=True)


def _lose_tasks(slurm: dict[str, str]) -> None:
    """The batch script and all that it started on its node, which lives: Slurm ends the job as one that failed."""
    _kill([pid for pid, _, _ in _processes(slurm["SLURM_CONF"])])


def _lose_script(slurm: dict[str, str]) -> None:
    """The batch script alone: Slurm asks tasks to end, as where the job is cancelled."""
    _kill([pid for pid, name, _ in _processes(slurm["SLURM_CONF"]) if name == "slurm_script"])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("lose", [_lose_power, _lose_tasks, _lose_script])
def test_an_elastic_job_goes_on_by_itself(
    lose: Callable[[dict[str, str]], None], slurm: dict[str, str], tmp_path: Path
) -> None:
    """Without its first node Slurm keeps it as running, with nothing in it; without its batch script, as failed.
    Whoever is left writes down what it holds and asks for more."""
    out = tmp_path / "run"
    run = ["run", jobs.reference("slow"), "--plan", "ddp", "--ranks", "2", "--elastic", "1:2", "--no-trace"]
    steps = ["--steps", "100", "--record-samples", "--checkpoint-every", "100000", "--out", str(out)]
    with (tmp_path / "said").open("w") as said:
        following = subprocess.Popen(
            [*PLAIT, *run, *steps, "--engine", "slurm", "--hosts", "2"], env=slurm, cwd=tmp_path,
            stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        while not (out / "metrics.jsonl").exists() or '"step": 8,' not in (out / "metrics.jsonl").read_text():
            assert following.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        lose(slurm)
        code = following.wait(240)
    finally:
        following.kill()
        following.wait()
    told = (tmp_path / "said").read_text()
    assert code == 0 and load_checkpoint(out).step == 100, told
    entries = [entry for entry in read_records(out / "samples.jsonl").entries if "ids" in entry]
    assert [entry["step"] for entry in entries] == list(range(100)), told  # none twice: it was handed on
