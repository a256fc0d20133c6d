"""`plait run` in one process: what it says first, and to whom."""

import json
from pathlib import Path

import pytest

from plait.cli.main import call

JOB = """
import torch
from torch import nn
from plait import Job


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 4)
        self.inner.bias.requires_grad_(False)

    def forward(self, x):
        return self.outer(self.inner(x).relu())


class Branching(Net):
    def forward(self, x):
        return super().forward(x if float(x.sum()) > 0 else -x)


def _job(model):
    return Job(model=model, data=(torch.randn(64, 16), torch.randn(64, 4)), loss=nn.functional.mse_loss,
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=16, steps=2)


def job():
    return _job(Net)


def eager():
    return _job(Branching)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "work.py").write_text(JOB)
    return str(tmp_path / "work.py")


@pytest.mark.parametrize(("function", "model"), [("job", "Net"), ("eager", "Branching")])
def test_its_first_lines_say_what_it_does(
    function: str, model: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert call(["run", f"{file}:{function}", "--plan", "single", "--out", str(out), "--no-trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    total, frozen = 16 * 32 + 32 + 32 * 4 + 4, 32
    assert lines[0] == f"{model}, {total} parameters ({frozen} frozen); plan single, 1 rank on cpu"
    assert lines[1] == f"batch 16, 2 steps; run folder {out}"


def test_a_program_reads_json_alone(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        call(["run", file, "--plan", "single", "--out", str(tmp_path / "run"), "--no-trace", "--json"]) == 0
    )
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--plan", "single", "--no-trace"),
        ("predict", "--plan", "ddp", "--cluster", "2xA100"),
        ("graph",),
        ("plan", "--cluster", "2xA100", "--top", "1"),
        ("verify", "--plan", "ddp", "--ranks", "2", "--serial", "--steps", "1"),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_what_a_job_prints_is_not_among_the_json(
    arguments: tuple[str, ...],
    file: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(f"import os\nprint('hello')\nos.write(1, b'from below')\n{JOB}")
    command, *options = arguments
    assert call([command, file, *options, "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)
    assert "hello" in said.err and "from below" in said.err
    print("here again")
    assert capfd.readouterr().out == "here again\n"
