"""A run folder is read as far as it goes, and its numbers are right."""

import json
import math
import os
import socket
import subprocess
from pathlib import Path

import pytest

from plait.errors import UsageError
from plait.files.records import sealed
from plait.report.record import read_run
from plait.report.summary import report_json, summarize


def test_a_complete_folder_has_nothing_to_note(run_dir: Path) -> None:
    record = read_run(run_dir)
    assert record.notes == ()
    assert (len(record.metrics), len(record.evaluations)) == (12, 3)
    assert record.trace is not None
    assert record.trace.ranks == (0, 1)


def test_an_empty_folder_says_all_that_is_missing(tmp_path: Path) -> None:
    notes = " ".join(read_run(tmp_path).notes)
    for name in ("plan.yaml", "metrics.jsonl", "environment.json", "trace"):
        assert name in notes


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        read_run(tmp_path / "absent")


def test_a_line_cut_short_by_a_crash_is_left_out_and_noted(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 13, "lo')
    record = read_run(run_dir)
    assert len(record.metrics) == 12
    assert any("1 unreadable line(s), left out: 16" in note for note in record.notes)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_environment_is_noted(run_dir: Path, text: str) -> None:
    (run_dir / "environment.json").write_text(text)
    record = read_run(run_dir)
    assert record.environment == {}
    assert any("environment.json" in note for note in record.notes)


def test_a_broken_trace_is_noted_and_the_rest_is_shown(run_dir: Path) -> None:
    (run_dir / "trace" / "rank1.json").write_text("{")
    record = read_run(run_dir)
    assert record.trace is None
    assert any("rank1.json" in note for note in record.notes)
    assert summarize(record).num_steps == 12


def test_the_summary(run_dir: Path) -> None:
    summary = summarize(read_run(run_dir))
    assert (summary.num_steps, summary.num_epochs) == (12, 4)
    assert (summary.first_loss, summary.final_loss) == (2.0, 2.0 / 12)
    time_s = sum(10 / (1000 + step) for step in range(2, 13))
    assert summary.samples_per_s == pytest.approx(
        110 / time_s
    )  # all samples over all time, without the warm-up
    assert summary.peak_memory_bytes == 12 * 1024
    best = {one.metric: (one.value, one.step) for one in summary.best}
    assert best == {"loss": (0.25, 11), "accuracy": (0.9, 7)}
    assert summary.final_evaluation == {"loss": 0.25, "accuracy": 0.8}


def test_the_report_is_json_even_when_training_diverged(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 12, "loss": math.nan}) + "\n")
    report = report_json(run_dir)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["summary"]["final_loss"] is None
    assert report["summary"]["num_steps"] == 13
    assert report["evaluations"][1] == {"step": 7, "epoch": None, "loss": 0.375, "accuracy": 0.9}
    assert [one["rank"] for one in report["breakdown"]] == [0, 1]
    assert report["breakdown"][0]["step_s"] == pytest.approx(10e-3)
    assert report["breakdown"][0]["hidden_communication_s"] == pytest.approx(2e-3)


def test_the_report_of_an_empty_folder(tmp_path: Path) -> None:
    report = report_json(tmp_path)
    assert report["breakdown"] == []
    assert report["summary"]["final_loss"] is None
    assert len(report["notes"]) == 4


def test_missing_and_repeated_steps_are_told(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 5, 6, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "environment.json").write_text('{"first_step": 0}')
    (tmp_path / "checkpoints" / "step-00000009").mkdir(parents=True)
    notes = read_run(tmp_path).notes
    assert "metrics.jsonl lacks 5 step(s): 0, 3 to 4, 7 to 8." in notes
    assert "metrics.jsonl has 1 step(s) more than once: 6." in notes


def test_a_run_that_was_killed_says_where_it_can_go_on(run_dir: Path) -> None:
    def notes(pid: int, host: str) -> list[str]:
        (run_dir / "run.lock").write_text(json.dumps({"pid": pid, "host": host, "since": "now"}))
        return [note for note in read_run(run_dir).notes if "did not come to its end" in note]

    with subprocess.Popen(["true"]) as ended:
        pass
    here = socket.gethostname()
    assert "no checkpoint was saved" in notes(ended.pid, here)[0]
    for step in (3, 12):
        (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    told = f"step-00000012: plait run --resume {run_dir} goes on from there."
    assert notes(ended.pid, here)[0].endswith(told)
    assert (
        notes(os.getpid(), here) == notes(ended.pid, "elsewhere") == []
    )  # it goes on, for all that is known


def test_a_record_that_was_changed_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(sealed({"step": 0, "loss": 1.5}).replace("1.5", "0.5"))
    record = read_run(tmp_path)
    assert record.metrics == ()
    assert any("line 1: its sum" in note and "was changed" in note for note in record.notes)
