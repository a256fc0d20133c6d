"""Real engines on this machine: a Slurm of two nodes, Open MPI, MPICH. Elsewhere these tests skip, naming a package."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from examples.lectures import lecture002_srun
from examples.lectures.slurm import NoSlurmError, two_nodes
from tests.ranks import jobs
from tests.ranks.hosts.hosts import PLAIT, ROOT, environment

from plait.files.records import read_records
from plait.run.checkpoint.store import load_checkpoint

pytestmark = pytest.mark.timeout(300)

EQUAL = "equal: the plan computes what one process computes"
_SECRET = "0f" * 16


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which srun and sbatch find a Slurm of two nodes."""
    try:
        with two_nodes(tmp_path_factory.mktemp("slurm"), environment()) as found:
            yield found
    except NoSlurmError as error:
        pytest.skip(str(error))


def _done(command: list[str], found: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(
        command, env=found, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


HYBRID = (
    "verify",
    jobs.reference("plain"),
    "--mesh",
    "data=2,tensor=2",
    "--plan",
    "megatron",
    "--steps",
    "2",
)


def test_srun_with_one_task_a_host(slurm: dict[str, str]) -> None:
    task = ["bash", "-c", 'PLAIT_HOST=$SLURM_NODEID exec "$@"', "task", *PLAIT, *HYBRID]
    said = _done(["srun", "-N2", "-n2", *task], slurm, ROOT)
    assert said.count(EQUAL) == 1


def test_the_lectures_srun_line(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lecture002_srun, "two_nodes", lambda *_: nullcontext(slurm))
    text, accuracy = lecture002_srun.run_it()
    assert "2 tasks of srun, 2 ranks: data=2" in text and accuracy > 0.9


def test_a_batch_job_is_submitted_and_followed(slurm: dict[str, str], tmp_path: Path) -> None:
    run = ["run", jobs.reference("plain"), "--plan", "ddp", "--ranks", "2", "--out", str(tmp_path / "run")]
    said = _done([*PLAIT, *run, "--engine", "slurm", "--hosts", "2"], slurm, tmp_path)
    assert said.count("run folder: ") == 1
    assert load_checkpoint(tmp_path / "run").step == 4


def test_a_batch_job_that_is_told_before_its_limit_saves_and_goes_on(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """Slurm's SIGUSR1 ahead of the limit."""
    out, over = tmp_path / "run", tmp_path / "over"
    (tmp_path / "job.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from dataclasses import replace\nfrom pathlib import Path\nfrom tests.ranks import jobs\n"
        "def job():\n"
        f"    data = jobs.Marked(None, lambda: time.sleep(0 if Path({str(over)!r}).exists() else 0.02))\n"
        "    return replace(jobs.plain(), data=data, epochs=None, steps=400)\n"
    )
    run = [
        *PLAIT,
        "run",
        str(tmp_path / "job.py"),
        "--plan",
        "ddp",
        "--ranks",
        "2",
        "--out",
        str(out),
        "--no-trace",
    ]

    def follow() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*run, "--engine", "slurm", "--hosts", "2"], env=slurm, cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait_for(path: Path, text: str) -> None:
        while not path.exists() or text not in path.read_text():
            assert following.poll() is None, following.communicate()[0]
            time.sleep(0.1)

    def job() -> str:
        return _done(["squeue", "-h", "-o", "%i"], slurm, tmp_path).split()[0]

    following = follow()
    try:
        wait_for(out / "metrics.jsonl", '"step": 3,')
        number = job()
        _done(["scancel", "--signal=USR1", number], slurm, tmp_path)
        while "Restarts=1" not in _done(["scontrol", "show", "job", number], slurm, tmp_path):
            assert following.poll() is None, following.communicate()[0]
            time.sleep(0.1)
        over.touch()
        said = following.communicate(timeout=200)[0]
        assert following.returncode == 0, said
        assert "interrupted and saved" in said and load_checkpoint(out).step == 400
        steps = [e["step"] for e in read_records(out / "metrics.jsonl").entries if "loss" in e]
        assert steps == list(range(400)), said
    finally:
        following.kill()
        following.wait()


def test_mpirun(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    run = ["run", jobs.reference("plain"), "--plan", "ddp", "--ranks", "2", "--out", str(tmp_path / "run")]
    more = [f"--engine-set={name}" for name in ("oversubscribe=1", "allow_root=1")]
    _done([*PLAIT, *run, "--engine", "mpi", "--hosts", "1", *more], environment(), ROOT)
    assert load_checkpoint(tmp_path / "run").step == 4


@pytest.fixture
def mpich(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """MPICH's mpirun, and the environment in which each host that it is given is this machine."""
    mpirun = shutil.which("mpirun.mpich") or shutil.which("mpiexec.hydra")
    if mpirun is None:
        pytest.skip("needs MPICH: apt-get install mpich")
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/launched\nexport PLAIT_HOST="$1"; shift\neval "$@"\n'
    )
    launcher.chmod(0o755)
    return mpirun, environment(HYDRA_LAUNCHER="rsh", HYDRA_LAUNCHER_EXEC=str(launcher), PLAIT_TOKEN=_SECRET)


def test_mpich_with_one_task_a_rank(mpich: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    mpirun, environment = mpich
    verify = ["verify", jobs.reference("plain"), "--plan", "zero3", "--ranks", "4", "--steps", "2"]
    options = [f"--engine-set={entry}" for entry in (f"mpirun={mpirun}", "hosts=127.0.0.2+127.0.0.3")]
    said = _done([*PLAIT, *verify, "--engine", "mpi", "--hosts", "2", *options], environment, ROOT)
    assert said.count(EQUAL) == 1 and "data=2 within each host, data=2 between hosts" in said, said
    launched = (tmp_path / "launched").read_text()
    assert launched.count("127.0.0.2 ") == launched.count("127.0.0.3 ") == 1
    assert _SECRET not in launched + said


def test_mpich_with_one_task_a_host(mpich: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """A script in between says nothing of where task 0 is, nor does it need to."""
    mpirun, environment = mpich
    task = ["sh", "-c", '"$@"; exit $?', "task", *PLAIT, *HYBRID]
    hosts = ["-hosts", "127.0.0.2,127.0.0.3", "-n", "2", "-ppn", "1"]
    assert _done([mpirun, *hosts, *task], environment, ROOT).count(EQUAL) == 1


PROVE = """
import sys
import plait
from tests.ranks import jobs

plan, mesh = sys.argv[1], dict((name, int(size)) for name, size in (e.split("=") for e in sys.argv[2].split(",")))
changes = plait.Changes(mesh=mesh, settings={"links": {"transport": "mpi"}})
found = plait.verify(jobs.dropout(), plan, changes=changes, steps=2)
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
