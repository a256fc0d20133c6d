"""Real engines on this machine: a Slurm of two nodes, and Open MPI. Elsewhere these tests skip and name a package."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ranks import jobs
from tests.ranks.hosts.hosts import PLAIT, ROOT, environment

from plait.run.checkpoint.store import load_checkpoint

pytestmark = pytest.mark.timeout(300)

CONFIGURATION = """
ClusterName=plait
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort=17000
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which srun and sbatch find a Slurm of two nodes."""
    for name, package in (("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm"), ("munged", "munge")):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}: apt-get install {package}")
    if os.getuid() != 0:
        pytest.skip("needs root, to be the Slurm of all users")
    folder = tmp_path_factory.mktemp("slurm")
    for above in (folder, *folder.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055) if above.owner() == "root" and above != Path("/") else None
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    found = environment(SLURM_CONF=str(folder / "slurm.conf"))
    commands = [
        ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.sock",
         f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            with (folder / "log").open("ab") as log:
                daemons.append(subprocess.Popen(command, env=found, stdout=log, stderr=log))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while (
            subprocess.run(
                ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=found, capture_output=True, check=False
            ).stdout
            != b"2\n"
        ):
            if time.monotonic() > deadline:
                pytest.skip(f"Slurm does not run here: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.2)
        yield found
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def _done(command: list[str], found: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(
        command, env=found, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_srun_with_one_task_a_host(slurm: dict[str, str]) -> None:
    verify = [
        "verify",
        jobs.reference("plain"),
        "--mesh",
        "data=2,tensor=2",
        "--plan",
        "megatron",
        "--steps",
        "2",
    ]
    task = ["bash", "-c", 'PLAIT_HOST=$SLURM_NODEID exec "$@"', "task", *PLAIT, *verify]
    said = _done(["srun", "-N2", "-n2", *task], slurm, ROOT)
    assert said.count("equal: the plan computes what one process computes") == 1


def test_a_batch_job_is_submitted_and_followed(slurm: dict[str, str], tmp_path: Path) -> None:
    run = ["run", jobs.reference("plain"), "--plan", "ddp", "--ranks", "2", "--out", str(tmp_path / "run")]
    said = _done([*PLAIT, *run, "--engine", "slurm", "--hosts", "2"], slurm, tmp_path)
    assert said.count("run folder: ") == 1
    assert load_checkpoint(tmp_path / "run").step == 4


def test_mpirun(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    run = ["run", jobs.reference("plain"), "--plan", "ddp", "--ranks", "2", "--out", str(tmp_path / "run")]
    more = [f"--engine-set={name}" for name in ("oversubscribe=1", "allow_root=1")]
    _done([*PLAIT, *run, "--engine", "mpi", "--hosts", "1", *more], environment(), ROOT)
    assert load_checkpoint(tmp_path / "run").step == 4


PROVE = """
import sys
import plait
from tests.ranks import jobs

plan, mesh = sys.argv[1], dict((name, int(size)) for name, size in (e.split("=") for e in sys.argv[2].split(",")))
found = plait.verify(jobs.dropout(), plan, mesh=mesh, steps=2, settings={"links": {"transport": "mpi"}})
if found.differences:  # of the task that compares
    print(plan, found.ok, found.first)
"""


@pytest.mark.parametrize(
    ("plan", "mesh", "tasks"), [("ddp", "data=3", 3), ("zero3", "data=2", 2), ("1f1b", "data=2,pipe=2", 4)]
)
def test_links_through_mpi(plan: str, mesh: str, tasks: int, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install plait[mpi]")
    script = tmp_path / "prove.py"
    script.write_text(PROVE)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(tasks)]
    assert f"{plan} True None" in _done([*mpirun, PLAIT[0], str(script), plan, mesh], environment(), ROOT)
