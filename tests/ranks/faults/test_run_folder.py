"""What a run folder promises: one writer, and a journal without holes, whoever is killed."""

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forked
from tests.ranks import jobs

from plait.files.records import read_records
from plait.report.record import read_run
from plait.run.checkpoint.store import load_checkpoint

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def runs() -> Iterator[list[subprocess.Popen[str]]]:
    """Runs of a test, ended with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until a checkpoint of this step or a later one is there."""
    while not any(int(path.name.split("-")[1]) >= step for path in folder.glob("checkpoints/step-????????")):
        assert process.poll() is None, process.communicate()  # how long it may take is the test's own limit
        time.sleep(0.02)


def test_a_run_that_goes_on_is_not_resumed_beside_it(
    tmp_path: Path, runs: list[subprocess.Popen[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    first = forked.plait(
        "run", jobs.reference("slow"), "--ranks", "2", "--out", folder, "--checkpoint-every", "5"
    )
    runs.append(first)
    wait_for_step(folder, 5, first)
    assert jobs.cli("run", "--resume", folder) == 2
    told = capfd.readouterr().err
    assert f"is being written to by process {first.pid} on " in told
    assert "Traceback" not in told
    first.kill()  # its lock is free at once: the ranks that share it die with it
    first.communicate()
    deadline = time.monotonic() + 10
    while jobs.cli("run", "--resume", folder, "--steps", "60") == 2:
        assert time.monotonic() < deadline, capfd.readouterr().err
    steps = [entry["step"] for entry in read_records(folder / "metrics.jsonl").entries]
    assert steps == list(range(load_checkpoint(folder).step))


def test_a_parent_that_was_killed_before_it_wrote_leaves_no_hole(
    tmp_path: Path, runs: list[subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "run"
    options = ("--plan", "server-sync", "--ranks", "3", "--checkpoint-every", "5", "--record-samples")
    first = forked.plait("run", jobs.reference("slow"), *options, "--steps", "60", "--out", folder)
    runs.append(first)
    wait_for_step(folder, 5, first)
    first.send_signal(signal.SIGSTOP)  # it hears nothing more, while servers go on saving
    known = max(int(path.name.split("-")[1]) for path in folder.glob("checkpoints/step-????????"))
    wait_for_step(folder, known + 10, first)
    first.kill()
    first.communicate()
    reached = load_checkpoint(folder).step
    written = len(read_records(folder / "metrics.jsonl").entries)
    assert written < reached  # the hole that is to be filled
    assert any(f"{written} to {reached - 1}" in note for note in read_run(folder).notes)
    assert jobs.cli("run", "--resume", folder) == 0
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [entry["step"] for entry in read_records(folder / name).entries] == list(range(60)), name
    ids = [number for entry in read_records(folder / "samples.jsonl").entries[:5] for number in entry["ids"]]
    assert len(ids) == len(set(ids)) == 64  # the first epoch, every sample once
    assert not any("lacks" in note for note in read_run(folder).notes)
    assert not (folder / "shares.jsonl").exists()
    assert json.loads((folder / "totals.json").read_text())["workers"] == 2


def test_options_of_the_optimizer_that_were_edited_are_not_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert jobs.cli("run", jobs.reference("plain"), "--ranks", "1", "--steps", "2", "--out", folder) == 0
    checkpoint = folder / "checkpoints" / "step-00000002"
    data = json.loads((checkpoint / "state.json").read_text())
    data["optimizer"]["groups"][0]["momentum"] = 0.0
    content = json.dumps(data).encode()
    manifest = json.loads((checkpoint / "complete.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "state.json").write_bytes(content)
    (checkpoint / "complete.json").write_text(json.dumps(manifest))
    assert jobs.cli("run", "--resume", folder, "--steps", "4") == 1
    assert "has momentum=0.9 in the job, momentum=0.0 in the checkpoint" in capfd.readouterr().err
