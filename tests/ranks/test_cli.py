"""The command line on real runs: what it leaves, what it prints, and what a program can read of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import jobs

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("leaves_no_process")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, with settings of the job and of the plan."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    settings = ("--set", "batch=25", "--set", "epochs=3", "--set", "sync.bucket_mib=0")
    given = ("--plan", "ddp", "--ranks", "2", "--out", folder, "--checkpoint-every", "4", "--record-samples")
    assert jobs.cli("run", jobs.reference("dropout"), *given, *settings) == 0
    return folder


def steps(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def test_a_run_leaves_everything_in_its_folder(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    expected = {
        "plan.yaml",
        "environment.json",
        "metrics.jsonl",
        "samples.jsonl",
        "trace",
        "checkpoints",
        "report.html",
        "totals.json",
        "run.lock",
    }
    assert expected == names
    assert len(steps(folder)) == 12  # 97 samples in steps of 25, three times
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints[-1] == "step-00000012"
    assert len(checkpoints) <= 2  # the newest two; one that a newer one overtakes is skipped
    assert "bucket_mib: 0" in (folder / "plan.yaml").read_text()
    page = (folder / "report.html").read_text()
    assert "<html" in page
    assert "http://" not in page.replace("http://www.w3.org", "")  # opens offline
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["settings"] == ["batch=25", "epochs=3", "sync.bucket_mib=0"]


def test_the_report_explains_a_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("report", folder) == 0
    told = capsys.readouterr().out
    assert "rank 0 compute" in told
    assert "rank 1 communication" in told
    assert jobs.cli("report", folder, "--json") == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_json_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("run", jobs.reference("plain"), "--ranks", "2", "--out", tmp_path / "run", "--json") == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert told["losses"] == [entry["loss"] for entry in steps(tmp_path / "run")]
    assert told["folder"] == str(tmp_path / "run")
    assert told["stopped"] is None
    assert printed.err == ""


def test_plain_lines_when_nobody_watches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("run", jobs.reference("plain"), "--ranks", "2", "--out", tmp_path / "run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 4/4  loss") and "samples/s" in line for line in lines)
    folder = tmp_path / "run"
    assert lines[-1] == f"run folder: {folder}  (plait report {folder}; {folder}/report.html)"
    assert "\x1b" not in "".join(lines)


def test_why_a_run_stopped_early_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "early.py"
    job.write_text(
        "from dataclasses import replace\nimport plait\nfrom tests.ranks.jobs import dropout\n"
        "def job():\n    return replace(dropout(), until=plait.Until(target=100.0))\n"
    )
    assert jobs.cli("run", job, "--out", tmp_path / "run") == 0
    assert "stopped: loss reached" in capsys.readouterr().out


def test_steps_and_the_plan_file(folder: Path, tmp_path: Path) -> None:
    given = ("--plan", folder / "plan.yaml", "--steps", "2", "--out", tmp_path / "run", "--no-trace")
    assert jobs.cli("run", jobs.reference("plain"), *given) == 0
    assert len(steps(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "plan.yaml").read_text() == (folder / "plan.yaml").read_text()
    assert not (tmp_path / "run" / "trace").exists()


def test_ranks_alone_mean_ddp(tmp_path: Path) -> None:
    assert jobs.cli("run", jobs.reference("plain"), "--ranks", "3", "--out", tmp_path / "run", "--json") == 0
    assert "plan: ddp" in (tmp_path / "run" / "plan.yaml").read_text()


def test_a_resumed_run_remembers_its_options(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (
        "--ranks",
        "2",
        "--out",
        tmp_path / "run",
        "--checkpoint-every",
        "1",
        "--record-samples",
        "--steps",
        "2",
    )
    monkeypatch.chdir(jobs.HERE.parent)
    assert jobs.cli("run", "jobs.py:dropout", *given, "--set", "batch=25", "--json") == 0
    monkeypatch.chdir(tmp_path)  # the job is found from anywhere
    assert jobs.cli("run", "--resume", "run", "--steps", "4", "--ranks", "3", "--json") == 0
    assert jobs.cli("run", "--resume", "run", "--steps", "5", "--json") == 0
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["ranks"], environment["steps"], environment["checkpoint_every"]) == (3, 5, 1)
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 5
    torch.testing.assert_close(
        [entry["loss"] for entry in steps(tmp_path / "run")],
        [entry["loss"] for entry in steps(folder)][:5],
        rtol=1e-4,
        atol=0,
    )


def test_verify_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("verify", jobs.reference("plain"), "--serial", "--ranks", "8", "--fp32") == 0
    told = capsys.readouterr().out
    assert "equal: the plan computes what one process computes" in told
    for kind in ("loss", "gradient", "weight"):
        assert kind in told
    assert "float32" in told


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("--help") == 0
    told = capsys.readouterr().out
    for command in ("run", "graph", "verify", "report", "export"):
        assert f" {command} " in told
    assert "--debug" in told


@pytest.mark.parametrize(
    "arguments", [("report", "nowhere"), ("export", "nowhere", "--to", "onnx"), ("fly",)]
)
def test_bad_usage_exits_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
