"""What engines are asked for: command lines, a batch script, a manifest."""

import json
import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from plait.cli.engine import without_engine
from plait.cli.main import call, main
from plait.errors import UsageError
from plait.run.engines import launchers
from plait.run.engines.host import HostTask, Shipped
from plait.run.engines.kubernetes import manifest
from plait.run.engines.launchers import mpi, torchrun
from plait.run.engines.request import Request
from plait.run.engines.slurm import script


def request(**more: object) -> Request:
    fields = {"arguments": ("run", "job.py", "--plan", "ddp", "--ranks", "4"), "hosts": 2, "ranks": 4}
    return Request(**(fields | more))  # type: ignore[arg-type]


def test_options_of_the_engine_do_not_reach_the_tasks() -> None:
    typed = [
        "run",
        "job.py",
        "--engine",
        "slurm",
        "--hosts=2",
        "--engine-set",
        "time=10",
        "--plan",
        "ddp",
        "--dry-run",
        "--ranks",
        "4",
    ]
    assert without_engine(typed) == ("run", "job.py", "--plan", "ddp", "--ranks", "4")


def test_torchrun() -> None:
    alone = torchrun(request(hosts=1))
    assert "--standalone" in alone and alone[alone.index("--nproc-per-node") + 1] == "4"
    assert alone[-6:] == ["run", "job.py", "--plan", "ddp", "--ranks", "4"]
    with pytest.raises(UsageError, match="started on each of 2 hosts"):
        torchrun(request())
    options = {"node_rank": "1", "master_addr": "node0"}
    assert torchrun(request(options=options))[6:10] == ["--nnodes", "2", "--node-rank", "1"]


def test_a_job_of_slurm_stays_when_a_node_is_lost_of_an_elastic_run() -> None:
    elastic = request(arguments=("run", "job.py", "--ranks", "4", "--elastic", "2:4"))
    text = script(elastic, "job", None)
    assert text.count("--no-kill") == 2
    assert "export PLAIT_REQUEUE=1 " in text
    assert "#SBATCH --nodes=1-2\n" in text and "export PLAIT_RANKS_EACH=2 " in text and "--resume" not in text
    assert not {"--no-kill", "PLAIT_RANKS_EACH", "1-2"} & set(script(request(), "job", None).split())
    assert (
        "#SBATCH --ntasks-per-node" not in text
    )  # by which Slurm gives one of 1-2 nodes, however many are free


def test_a_job_that_outlived_a_node_ended_as_its_first_task_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script as bash runs it, with an srun that ends like a task that was killed."""
    elastic = request(arguments=("run", "job.py", "--ranks", "4", "--elastic", "2:4"))
    says = 'if [ -n "$FIRST" ]; then echo "$FIRST" > "$PLAIT_STATUS"; fi; exit 137'
    for name, lines in (("srun", says), ("squeue", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for first, expected in (("0", 0), ("1", 1), ("", 137)):
        monkeypatch.setenv("FIRST", first)
        text = script(elastic, "job", str(tmp_path / "run"))
        done = subprocess.run(["bash", "-c", text], check=False, timeout=60, cwd=tmp_path)
        assert done.returncode == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["squeue", "srun"]


@pytest.mark.parametrize(
    ("steps", "state", "expected"),
    [("new", "RUNNING", 0), ("new", "COMPLETING", 130), ("old", "RUNNING", 137)],
)
def test_a_job_whose_step_was_killed_is_requeued_where_it_got_on(
    steps: str, state: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when srun is killed, which takes all tasks along: nobody but the batch script is left to ask. One that got
    no further than the last time would be killed again, without an end."""
    elastic = request(arguments=("run", "job.py", "--ranks", "4", "--elastic", "2:4"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    os.utime(run / "metrics.jsonl", (1, 1))
    trains = f"touch {run}/metrics.jsonl" if steps == "new" else "true"
    lines = {
        "srun": f"sleep 0.1; {trains}; exit 137",
        "squeue": f"echo {state}",
        "scontrol": f'echo "$@" > {tmp_path}/asked',
        "sleep": "exec /bin/sleep ${1%600}0",  # nobody ends this script
    }
    for name, line in lines.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = subprocess.run(
        ["bash", "-c", script(elastic, "job", str(run))], check=False, timeout=60, cwd=tmp_path
    )
    asked = tmp_path / "asked"
    if expected == 0:
        assert asked.read_text() == "requeue 7\n"
    else:
        assert not asked.exists() and done.returncode == expected


@pytest.mark.parametrize(("task", "left"), [("0", "2\n"), ("1", None)])
def test_the_first_task_leaves_word_of_how_it_ended(
    task: str, left: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("PLAIT_STATUS", str(tmp_path / "status")),
        ("PLAIT_TASK", task),
        ("PLAIT_TASKS", "2"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["plait", "report", "--nothing"])
    monkeypatch.setattr("gc.freeze", lambda: None)
    with pytest.raises(SystemExit):
        main()
    found = tmp_path / "status"
    assert (found.read_text() if found.exists() else None) == left


def test_the_token_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_TOKEN", "a secret of this test")
    for made in (
        mpi(request()),
        [script(request(), "job", None)],
        [manifest(request(options={"image": "a:1"}), "job")],
    ):
        assert "a secret" not in " ".join(made)
    assert mpi(request(options={"hosts": "a+b"}))[:7] == [
        "mpirun",
        "-n",
        "4",
        "-x",
        "PLAIT_TOKEN",
        "-H",
        "a:2,b:2",
    ]


def test_mpich_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_is_hydra", lambda mpirun: True)
    elastic = ("run", "job.py", "--ranks", "4", "--elastic", "2:4")
    options = {"mpirun": "mpirun.mpich", "hosts": "a+b", "first": "a", "oversubscribe": "1"}
    made = mpi(request(arguments=elastic, options=options))
    expected = ["mpirun.mpich", "-n", "4", "-hosts", "a:2,b:2", "-genv", "PLAIT_FIRST_ADDRESS", "a"]
    assert made[:9] == [*expected, "-disable-auto-cleanup"]
    assert "-disable-auto-cleanup" not in mpi(request(options=options))


def test_hosts_that_are_named_are_as_many_as_there_are_to_be() -> None:
    with pytest.raises(UsageError, match=r"hosts=a\+b\+c names 3 hosts; --hosts says 2"):
        mpi(request(options={"hosts": "a+b+c"}))


def test_the_batch_script_is_one_that_a_shell_reads(tmp_path: Path) -> None:
    text = script(request(options={"partition": "gpu", "time": "1:00:00"}), "job", "/runs/it's here")
    for line in (
        "--nodes=2",
        "--partition=gpu",
        "--time=1:00:00",
        "--requeue",
        "--signal=USR1@120",
    ):
        assert f"#SBATCH {line}\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    with pytest.raises(UsageError, match="no value for a line"):
        script(request(options={"partition": "a\n#SBATCH --x"}), "job", None)
    with pytest.raises(UsageError, match="not known to this engine"):
        script(request(options={"nodes": "3"}), "job", None)


def test_a_manifest_of_kubernetes() -> None:
    service, job = (
        json.loads(part) for part in manifest(request(options={"image": "a:1"}), "My_job").split("---")
    )
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == "my-job"
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == 2
    names = {entry["name"] for entry in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert {"PLAIT_TASK", "PLAIT_TASKS", "PLAIT_FIRST_ADDRESS", "PLAIT_TOKEN"} <= names


@pytest.mark.parametrize(
    ("file", "name"), [("2layers", "plait-2layers"), ("a" * 39 + "_b", "a" * 39), ("___", "plait")]
)
def test_kubernetes_takes_any_name_of_a_job(file: str, name: str) -> None:
    made = manifest(request(options={"image": "a:1"}), file).split("---")
    assert {json.loads(part)["metadata"]["name"] for part in made} == {name}


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize("words", [["--hosts", "2"], ["--dry-run"], ["--engine-set", "time=1:00:00"]])
def test_what_is_for_an_engine_is_not_left_out(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else four ranks that were meant for two hosts train on one."""
    assert call([command, "job.py", "--plan", "ddp", "--ranks", "4", *words]) == 2
    assert f"{words[0]} without --engine" in capsys.readouterr().err


def test_dry_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "job.py", "--engine", "slurm", "--hosts", "2", "--ranks", "4", "--dry-run"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert call(["run", "job.py", "--engine", "kubernetes", "--hosts", "2"]) == 2
    assert call(["run", "job.py", "--engine", "nothing", "--dry-run"]) == 2
    assert call(["run", "job.py", "--engine", "mpi", "--hosts", "2", "--ranks", "3", "--dry-run"]) == 2
    assert "3 ranks cannot be spread over 2 hosts" in capsys.readouterr().err


def test_a_task_on_another_host_runs_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the job's file as it lies there; where that folder is not here, with a copy of the file."""
    (tmp_path / "job.py").write_text("beside = 1")
    monkeypatch.chdir(tmp_path)
    shipped = Shipped.of(["run", "job.py:job", "--out", "a"])
    assert shipped is not None
    monkeypatch.chdir("/")
    said = b""
    entry = "import os, sys; print(os.getcwd(), *sys.argv[1:])"
    with closing(HostTask(["run", "job.py:job"], {}, shipped, str(tmp_path), entry)) as task:
        code = None
        while code is None:
            piece, code = task.read(1.0)
            said += piece
    assert (code, said.decode()) == (0, f"{tmp_path} run job.py:job\n")
    (tmp_path / "copies").mkdir()
    elsewhere = shipped.arguments(["run", "job.py:job"], tmp_path / "copies", "/no/such/folder")
    assert elsewhere == ["run", f"{tmp_path}/copies/job.py:job"]
    assert (tmp_path / "copies" / "job.py").read_text() == "beside = 1"
