"""Arguments of a job function, from the command line and from Python, and when a run is resumed."""

from pathlib import Path

import pytest

import plait
from plait.cli.main import call
from plait.errors import UsageError

JOB = """
import torch
from torch import nn
import plait

def job(lr: float, width=4, extra=None):
    return plait.Job(model=lambda: nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)), data=(torch.ones(8, 2),
        torch.ones(8, 1)), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=lr), batch=4, steps=1)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "argued.py").write_text(JOB)
    return str(tmp_path / "argued.py")


def rates(folder: Path) -> list[float]:
    return [line["lr"] for line in plait.read_run(folder).metrics]


def test_a_run_keeps_its_arguments_for_a_resume(path: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call(["run", path, "--arg", "lr=3e-2", "--arg", "width=8", "--out", str(out), "--no-trace"]) == 0
    assert call(["run", "--resume", str(out), "--steps", "2", "--no-trace"]) == 0
    assert rates(out) == [0.03, 0.03]
    assert plait.resume(out, steps=3, saving=plait.Saving(trace=False)).weights["0.weight"].shape == (8, 2)
    with pytest.raises(plait.PlaitError, match="starts with the learning rates"):
        plait.resume(out, steps=4, changes=plait.Changes(args={"lr": 0.5}), saving=plait.Saving(trace=False))


def test_every_command_takes_them(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [path, "--arg", "lr=1", "--arg", "width=16"]
    assert call(["graph", *given]) == 0
    assert call(["graph", *given, "--placements", "--plan", "ddp"]) == 0
    assert call(["predict", *given, "--plan", "ddp", "--cluster", "2xA100"]) == 0
    assert call(["plan", *given, "--cluster", "2xA100"]) == 0
    assert call(["verify", *given, "--serial", "--plan", "ddp", "--steps", "1"]) == 0
    assert call(["run", path]) == 2
    assert "argued.py:job(lr: float, width=4, extra=None) needs lr" in capsys.readouterr().err


def test_what_is_no_argument_is_refused(path: str, tmp_path: Path) -> None:
    for entries in (["lr"], ["lr=1", "lr=2"], ["=1"]):
        assert call(["run", path, *(word for entry in entries for word in ("--arg", entry))]) == 2
    with pytest.raises(UsageError, match="cannot keep"):
        plait.train(
            path, "single", changes=plait.Changes(args={"lr": 1.0, "extra": [1]}), out=tmp_path / "run"
        )
    with pytest.raises(UsageError, match="has been made"):
        plait.train(plait.load_job(path, {"lr": 1}), "single", changes=plait.Changes(args={"lr": 1.0}))
