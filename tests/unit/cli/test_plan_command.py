"""`plait plan`: the table, the file that `plait run` takes, exports, scaling, and what cannot be done."""

import json
from pathlib import Path

import pytest
import torch
from tests.zoo import ZOO
from torch import Tensor, nn

from plait.api import auto
from plait.cli.main import call
from plait.cluster.parse import parse_cluster
from plait.errors import PlanError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.report.scaling_picture import scaling_picture
from plait.search.choose.subject import subject_of_job
from plait.search.predict.shallow import shallow_job

JOBS = """
from tests.zoo import ZOO

def mlp(): return ZOO["mlp"].job(batch=8)
def branching(): return ZOO["branching"].job()
"""
PAPER = ("--model", "gpt:layers=4,hidden=64,heads=4,seq=32,vocab=64", "--batch", "8")


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "zoo_jobs.py"
    path.write_text(JOBS)
    return str(path)


def test_table_file_and_explanation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    assert call(["plan", *PAPER, "--cluster", "2xA100", "--price", "2", "--explain", "--out", str(path)]) == 0
    text = capsys.readouterr().out
    for words in (
        "samples/s",
        "MFU",
        "cost/1k",
        "Not ranked",
        "pipedream",
        "Why the first",
        "The second takes",
    ):
        assert words in text
    plan = resolve(path, 2)
    assert plan.mesh.size == 2
    comment = [line for line in path.read_text().splitlines() if "accumulate=" in line]
    assert comment[0].startswith("# ")
    assert "--set accumulate=" in text
    assert "plait run" not in text  # nothing is to be run on devices that this machine has not
    assert "it needs 2 devices" in " ".join(text.split())


def test_complaint_01_plans_are_ranked_with_time_memory_and_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    arguments = ["plan", *PAPER, "--cluster", "2xA100", "--memory", "2.1GB", "--json"]
    assert call([*arguments, "--export", "deepspeed", "--out", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["plans"][0]["memory_bytes"]["total"] <= 2.1e9
    others = said["plans"][1:]  # the first is the simplest of the fastest
    assert others == sorted(others, key=lambda plan: float(plan["step_s"]))
    assert all(plan["step_s"] > 0 and plan["memory_bytes"]["activations"] > 0 for plan in said["plans"])
    assert {"server-async", "local-sgd", "pipedream"} <= set(said["relaxed"]), (
        "only a person can choose these"
    )
    written = json.loads(path.read_text())
    assert written["train_batch_size"] == 8
    assert "deepspeed" in said["written"][0]
    assert call(["plan", *PAPER[:2], "--batch", "7", "--cluster", "2xA100", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "batch 7 does not divide over data=2" in {entry["reason"] for entry in said["rejected"]}


def test_scaling_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scale.svg"
    arguments = ["plan", *PAPER, "--cluster", "4xA100", "--plan", "ddp", "--scale", "1,2", "--svg", str(path)]
    assert call(arguments) == 0
    text = capsys.readouterr().out
    assert "efficiency" in text
    assert "1.00" in text
    assert path.read_text().count("<circle") == 2
    assert "a &lt; b" in scaling_picture("a < b", [(1, 5.0), (2, 9.0)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "8xA100"], "a JOB or --model"),
        ([*PAPER, "--cluster", "8xZ900"], "no device 'Z900'"),
        ([*PAPER, "--cluster", "none.yaml"], "none.yaml"),
        ([*PAPER, "--cluster", "8xA100", "--ranks", "0"], "--ranks 0"),
        ([*PAPER, "--cluster", "8xA100", "--ranks", "9"], "8 devices"),
        ([*PAPER, "--cluster", "2xA100", "--memory", "1MiB"], "no plan fits"),
        ([*PAPER, "--cluster", "2xA100", "--memory", "much"], "--memory much"),
        ([*PAPER, "--cluster", "2xA100", "--export", "jax"], "megatron"),
        ([*PAPER, "--cluster", "2xA100", "--scale", "1,x"], "1,2,4,8"),
        ([*PAPER, "--cluster", "2xA100", "--set", "memory.zero=1"], "belongs to a plan"),
        (["--model", "gtp2", "--cluster", "2xA100"], "did you mean 'gpt2'"),
    ],
)
def test_impossible_requests_are_told(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["plan", *arguments]) in (1, 2)
    told = capsys.readouterr().err
    assert words in told
    assert "Fix: " in told
    assert "Traceback" not in told


def test_a_model_that_cannot_be_captured(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", f"{jobs}:branching", "--cluster", "2xA100"]) == 1
    assert "CaptureError" in capsys.readouterr().err


def test_auto_times_the_best_and_sets_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is not measured here: two ranks of a plain CPU."""
    monkeypatch.setattr(auto, "this_machine", lambda device, tell: parse_cluster("2xcpu"))
    monkeypatch.setattr(auto, "remember", lambda cluster: None)
    stages: list[str] = []
    found = auto.choose_for_run(ZOO["mlp"].job(batch=8), "mlp", 2, "cpu", stages.append)
    assert found.plan.mesh.size == 2
    assert found.job.batch == 8
    assert "compiled and timed" in found.told
    assert "simulating" in stages
    with pytest.raises(PlanError, match="this machine has 2 devices"):
        auto.choose_for_run(ZOO["mlp"].job(batch=8), "mlp", 4, "cpu", stages.append)


class Block(nn.Module):
    def __init__(self, number: int, slope: float) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)
        self.relu = nn.LeakyReLU(slope)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.linear(x))


class Deep(nn.Module):
    def __init__(self, slopes: tuple[float, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, slope) for number, slope in enumerate(slopes))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def deep_job(slopes: tuple[float, ...] = (0.1,) * 6) -> Job:
    return Job(
        model=lambda: Deep(slopes),
        data=(torch.randn(16, 8), torch.arange(16) % 2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        batch=8,
    )


def test_complaint_21_deep_models_are_captured_with_few_blocks() -> None:
    assert shallow_job(ZOO["mlp"].job(), 2) is None
    deep = shallow_job(deep_job(), 2)
    assert deep is not None
    assert (deep.path, deep.num_blocks) == ("blocks", 6)
    folded, whole = subject_of_job(deep_job(), "deep"), subject_of_job(deep_job((0.1, 0.2) * 3), "deep")
    assert folded.num_blocks == 6
    assert whole.num_blocks is None
    one, other = (subject.costs(tensor=1, sequence=False) for subject in (folded, whole))
    assert one.parameters == other.parameters
    assert one.flops == other.flops
