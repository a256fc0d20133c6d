"""Runs in barrier tasks of Spark with two workers. Where there is no pyspark or Java, these tests skip and name it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ranks.hosts.hosts import environment

from plait.files.records import read_records

pytestmark = pytest.mark.timeout(280)

SCRIPT = """
import os
import sys

import cloudpickle
import plait
import plait.errors
import plait.horovod.spark
import plait.spark
import torch
from pyspark.sql import SparkSession
from torch import nn

os.environ["PYSPARK_PYTHON"] = sys.executable
builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
session = builder.config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"]).getOrCreate()
cloudpickle.register_pickle_by_value(sys.modules["__main__"])
frame = session.createDataFrame([([float(i)] * 4, i % 3) for i in range(41)], "x array<float>, y long")
job = plait.Job(
    model=lambda: nn.Linear(4, 3), data=[0], loss=nn.CrossEntropyLoss(), batch=6, epochs=1,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
)
result = plait.spark.train(job, session, "ddp", 2, data=frame, out="run", arguments=["--record-samples"])
assert len(result.losses) == 7 and result.stopped is None


def meet():
    import plait.horovod as hvd

    hvd.init()
    return hvd.rank(), hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()


assert plait.horovod.spark.run(meet, num_proc=2) == [(0, 3.0), (1, 3.0)]
try:
    plait.horovod.spark.run(meet, num_proc=3)
except plait.errors.UsageError as error:
    assert "3 ranks are 3 tasks at once, and Spark has room for 2." in str(error), error
else:
    raise AssertionError("there is no room for three")
print("right")
"""


def test_a_frame_is_read_by_partitions(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="needs the package pyspark: pip install plait[spark]")
    if shutil.which("java") is None:
        pytest.skip("needs Java: apt-get install openjdk-17-jre-headless")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=270,
        check=False,
    )  # fmt: skip
    assert done.stdout.rstrip().endswith("right"), done.stdout + done.stderr
    entries = read_records(tmp_path / "run" / "samples.jsonl").entries
    assert sorted(number for entry in entries for number in entry["ids"]) == list(range(40))


CLOSED = """
from pathlib import Path
from plait.run.engines.spark import session_here

session = session_here(None, 2)
java = [Path(f"/proc/{pid}") for pid in Path("/proc/self/task").glob("*/children") for pid in pid.read_text().split()]
sockets = {file.resolve().name for process in java for file in (process / "fd").iterdir()}
doors = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
print({door[1][:32] for door in doors if door[3] == "0A" and f"socket:[{door[9]}]" in sockets})
print(session.conf.get("spark.authenticate"), session.sparkContext.uiWebUrl)
session.stop()
"""


def test_a_session_of_our_own_listens_to_nobody_else(tmp_path: Path) -> None:
    """By itself Spark listens at the host's address and lets anybody fetch what it holds, the run's token too."""
    pytest.importorskip("pyspark", reason="needs the package pyspark: pip install plait[spark]")
    if shutil.which("java") is None:
        pytest.skip("needs Java: apt-get install openjdk-17-jre-headless")
    done = subprocess.run(
        [sys.executable, "-c", CLOSED], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    loopback = "0000000000000000FFFF00000100007F"
    assert done.stdout.splitlines() == [str({loopback}), "true None"], done.stdout + done.stderr
