"""`plait predict` and `plait measure` from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from plait.api import machine
from plait.cli.main import call
from plait.cluster.files import read_cluster, write_cluster
from plait.cluster.parse import parse_cluster

JOB = """
import torch
from torch import nn
from plait import Job


def job():
    data = (torch.randn(64, 16), torch.randn(64, 4))
    return Job(model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), data=data,
               loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.AdamW(p), batch=16, steps=2)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work.py").write_text(JOB)
    return str(tmp_path / "work.py")


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_numbers_of_a_paper_cluster(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = tmp_path / "timeline.json"
    arguments = ["predict", job, "--plan", "zero3", "--ranks", "4", "--cluster", "8xA100", "--json"]
    assert call([*arguments, "--trace", str(timeline)]) == 0
    found = told(capsys)
    assert found["mesh"] == {"data": 4} and found["fits"] and found["reason"] is None
    assert found["samples_per_s"] == pytest.approx(16 / found["step_s"])
    kinds = {kind: size for kind, size in found["memory_bytes"].items() if kind != "total"}
    assert sum(kinds.values()) == pytest.approx(found["memory_bytes"]["total"])
    assert json.loads(timeline.read_text())


def test_a_plan_that_does_not_fit_fails_with_the_numbers(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", job, "--plan", "ddp", "--ranks", "2", "--cluster", "2xA100", "--memory", "1MiB"]
    assert call(arguments) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "of 1.0 MiB" in out


def test_bad_clusters_are_bad_usage(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["predict", job, "--plan", "ddp", "--ranks", "2", "--cluster", "8xZ9"]) == 2
    assert "no device 'Z9'" in capsys.readouterr().err
    assert call(["predict", job, "--cluster", "A100", "--memory", "lots"]) == 2
    assert call(["predict", job, "--plan", "ddp", "--ranks", "4", "--cluster", "2xA100"]) == 2


def test_this_machine_is_remembered(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was timed for one prediction is kept for the next; a machine that was measured is not measured again."""
    path = tmp_path / ".cache" / "plait" / "this.yaml"
    write_cluster(parse_cluster("1xcpu"), path, {"notice": None})
    monkeypatch.setattr(machine, "measure_machine", lambda *a: pytest.fail("measured again"))
    assert call(["predict", job, "--json"]) == 0
    assert told(capsys)["cluster"] == "1xcpu"
    assert any("aten.addmm" in key for key in read_cluster(path).device.timed)
