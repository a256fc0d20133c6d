"""Runs on a cluster of Ray with two nodes, on this machine. Where there is no ray, these tests skip and name it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import jobs
from tests.ranks.hosts.hosts import PLAIT, environment

from plait.files.records import read_records
from plait.run.checkpoint.store import load_checkpoint

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    utils = pytest.importorskip("ray.cluster_utils", reason="needs the package ray: pip install plait[ray]")
    before = dict(os.environ)
    os.environ.update(environment(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0"))
    found = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=2)
    os.environ.clear()
    os.environ.update(before)
    yield found
    found.shutdown()


def _start(cluster: Any, *arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*PLAIT, *arguments, "--engine", "ray", "--hosts", "2"], cwd=cwd, text=True, start_new_session=True,
        env=environment(RAY_ADDRESS=cluster.address), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _lose(cluster: Any, task: int) -> None:
    """Take away the node on which a task runs."""
    marks = {f"PLAIT_TASK={task}".encode()}
    for node in list(cluster.worker_nodes):
        for pid in _below(node.all_processes["raylet"][0].process.pid):
            with suppress(OSError):
                if marks & set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    cluster.remove_node(node, allow_graceful=False)
                    return
    raise AssertionError(f"no node has task {task}")


def _below(pid: int) -> list[int]:
    found = [pid]
    for above in found:
        for file in Path(f"/proc/{above}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, file.read_text().split())
    return found


def test_a_run_on_two_nodes_outlives_that_of_task_0(cluster: Any, tmp_path: Path) -> None:
    """The job is shipped as it is."""
    over, out = tmp_path / "over", tmp_path / "run"
    (tmp_path / "job.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(jobs.HERE.parents[2])!r})\n"
        "from dataclasses import replace\nfrom pathlib import Path\nfrom tests.ranks import jobs\n"
        "def job():\n"
        f"    data = jobs.Marked(None, lambda: time.sleep(0 if Path({str(over)!r}).exists() else 0.1))\n"
        "    return replace(jobs.plain(), data=data, epochs=None, steps=400)\n"
    )
    options = ["--plan", "ddp", "--ranks", "4", "--elastic", "2:4", "--record-samples", "--no-trace"]
    run = _start(cluster, "run", "job.py", "--out", str(out), *options, cwd=tmp_path)

    def wait_for(name: str, text: str) -> None:
        while not (out / name).exists() or text not in (out / name).read_text():
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)

    try:
        wait_for("metrics.jsonl", '"step": 9,')
        _lose(cluster, 0)
        wait_for("outlived.json", "The run was started again.")
        over.touch()  # that a host comes back is tried with torchrun: Ray takes minutes to offer it
        said, complained = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        cluster.add_node(num_cpus=2)  # for the next test
    assert run.returncode == 0, said + complained
    assert "ray: 2 host(s) of 3 with CPU 2 each" in complained
    assert any(line.startswith("run folder: ") for line in said.splitlines()), said
    events = json.loads((out / "outlived.json").read_text())
    assert [event["plan"] for event in events] == ["data=2"]
    assert not any(event["repeated_steps"] for event in events)  # each held everything
    assert load_checkpoint(out).step == 400
    assert [entry["step"] for entry in read_records(out / "samples.jsonl").entries] == list(range(400))


def test_what_a_job_raises_comes_back(cluster: Any, tmp_path: Path) -> None:
    run = _start(cluster, "run", jobs.reference("raising_model"), "--ranks", "2", cwd=tmp_path)
    said, complained = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "ArithmeticError: the network met a huge number" in said + complained


CALLS = """
import sys
import cloudpickle
import plait.errors
import plait.horovod.ray
cloudpickle.register_pickle_by_value(sys.modules["__main__"])

def meet(wrong=False):
    import torch
    import plait.horovod as hvd
    hvd.init()
    if wrong and hvd.rank() == 1:
        raise ValueError("by itself")
    return hvd.rank(), hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()

assert plait.horovod.ray.run(meet, num_proc=2) == [(0, 3.0), (1, 3.0)]
try:
    plait.horovod.ray.run(meet, kwargs={"wrong": True}, num_proc=2)
except plait.errors.RunError as error:
    print(error)
"""


def test_a_function_of_horovods_kind_on_every_rank(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CALLS)
    done = subprocess.run(
        [PLAIT[0], "script.py"], cwd=tmp_path, env=environment(RAY_ADDRESS=cluster.address), capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 1 ended with exit status 1" in done.stdout and "ValueError: by itself" in done.stdout
