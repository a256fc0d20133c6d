"""A disk without room: told in one line with its cause, what was saved and how much is needed."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forked
from tests.ranks import jobs
from tests.unit.run.checkpoint.checkpoint_states import small_state

from plait.errors import CheckpointError
from plait.files.records import read_records
from plait.run.checkpoint.store import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 600 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path, leave: int) -> Path:
    """A file that takes all room but `leave` bytes."""
    room = os.statvfs(disk)
    path = disk / "filler"
    path.write_bytes(bytes(max(0, room.f_bavail * room.f_bsize - leave)))
    return path


def test_a_run_that_cannot_be_saved_is_not_started(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk, 200 << 10)
    run = ("run", jobs.reference("slow"), "--ranks", "2", "--steps", "5", "--out", small_disk / "run")
    assert jobs.cli(*run) == 1
    told = capfd.readouterr().err
    assert "DiskError: the disk of " in told
    assert "KiB free; the run needs " in told
    assert (
        "a checkpoint takes about 10.9 KiB, there is one at the end, and records take 256 KiB or more."
        in told
    )
    assert "Traceback" not in told
    assert not (small_disk / "run").exists()


def test_a_disk_that_fills_up_is_told_once_and_loses_nothing(small_disk: Path) -> None:
    folder = small_disk / "run"
    process = forked.plait(
        "run", jobs.reference("slow"), "--ranks", "2", "--checkpoint-every", "5", "--out", folder
    )
    deadline = time.monotonic() + 60
    while not any(folder.glob("checkpoints/step-????????")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    filler = fill(small_disk, 0)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1, told
    assert "Traceback" not in told
    assert told.count("Error: ") == 1, told
    assert "metrics.jsonl cannot be written: No space left on device; it needs " in told
    step = load_checkpoint(folder).step
    assert f"Saved is step-{step:08d}: plait run --resume {folder} goes on from there." in told
    assert "No space left on device" in (folder / "failure.txt").read_text()
    records = read_records(folder / "metrics.jsonl")
    assert records.problems == ()  # no torn line
    assert [entry["step"] for entry in records.entries][:step] == list(range(step))
    filler.unlink()
    assert jobs.cli("run", "--resume", folder, "--steps", str(step + 20)) == 0
    assert [entry["step"] for entry in read_records(folder / "metrics.jsonl").entries] == list(
        range(step + 20)
    )


def test_what_a_run_can_do_without_is_a_notice(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No room for traces: the run ends well all the same."""
    fill(small_disk, 345 << 10)
    run = ("run", jobs.reference("slow"), "--ranks", "2", "--steps", "400", "--out", small_disk / "run")
    assert jobs.cli(*run) == 0
    told = "".join(capfd.readouterr())
    assert "cannot be written: No space left on device" in told
    assert "The run does not depend on it." in told
    assert load_checkpoint(small_disk / "run").step == 400


def test_a_save_that_cannot_fit_does_not_fill_the_disk(small_disk: Path) -> None:
    fill(small_disk, 0)
    with pytest.raises(CheckpointError, match=r"No space left on device; it needs .* and 0 B is free"):
        save_checkpoint(small_disk / "checkpoints", small_state(1))
    assert not any(small_disk.rglob("*.safetensors"))
