"""Runs that are killed, interrupted or moved to other ranks go on as if nothing had happened."""

import json
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import forked
from tests.ranks import jobs
from tests.zoo import ZOO

import plait
from plait.errors import CheckpointError, UsageError
from plait.run.checkpoint import saver as checkpoint_saver
from plait.run.checkpoint.store import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.timeout(120)

STEPS = 80


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    steps = [entry for entry in lines(folder, "metrics.jsonl") if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(len(steps)))
    return [entry["loss"] for entry in steps]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on two ranks."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    plait.train(
        jobs.slow(),
        ranks=2,
        steps=STEPS,
        out=folder,
        saving=plait.Saving(checkpoint_every=10, record_samples=True),
    )
    return folder


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until a checkpoint of this step or a later one is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [int(path.name.split("-")[1]) for path in folder.glob("checkpoints/step-*")]
        if found and max(found) >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no checkpoint came")


def kill_run(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=20)


def test_complaint_13_14_a_killed_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = (jobs.reference("slow"), "--ranks", "2", "--steps", str(STEPS), "--out", folder)
    first = forked.plait("run", *given, "--checkpoint-every", "10", "--record-samples")
    wait_for_step(folder, 20, first)
    time.sleep(random.Random(time.time_ns()).random() * 0.1)  # any moment will do
    kill_run(first)
    reached = load_checkpoint(folder).step
    assert 20 <= reached < STEPS
    assert (
        jobs.cli("run", "--resume", folder, "--json") == 0
    )  # the job, the plan and the options are remembered
    assert losses(folder) == losses(whole)
    assert lines(folder, "samples.jsonl") == lines(whole, "samples.jsonl")
    ours, theirs = load_checkpoint(folder), load_checkpoint(whole)
    assert ours.step == theirs.step == STEPS
    for name in theirs.parameters:
        assert torch.equal(ours.parameters[name], theirs.parameters[name]), name
        for key, tensor in theirs.optimizer.tensors[name].items():
            assert torch.equal(ours.optimizer.tensors[name][key], tensor), (name, key)
    for name in theirs.buffers:
        assert torch.equal(ours.buffers[name], theirs.buffers[name]), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_can_be_resumed(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ranks = "2" if number == signal.SIGINT else "1"
    process = forked.plait(
        "run",
        jobs.reference("slow"),
        "--ranks",
        ranks,
        "--steps",
        str(STEPS),
        "--out",
        folder,
        "--checkpoint-every",
        "5",
    )
    wait_for_step(folder, 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    assert f"interrupted and saved; to go on: plait run --resume {folder}" in err
    step = load_checkpoint(folder).step
    assert step < STEPS
    assert len(losses(folder)) == step  # the last step that was made was saved
    assert jobs.cli("run", "--resume", folder) == 0
    if ranks == "2":
        assert losses(folder) == losses(whole)
    else:
        assert losses(folder) == pytest.approx(losses(whole), rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_complaint_11_14_other_ranks_go_on_with_the_same_samples(
    ranks: int, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    plait.train(jobs.slow(), ranks=2, steps=30, out=folder, saving=plait.Saving(record_samples=True))
    result = plait.resume(
        folder, ranks, job=jobs.slow(), steps=40, out=folder, saving=plait.Saving(record_samples=True)
    )
    assert len(result.losses) == 10
    assert lines(folder, "samples.jsonl") == lines(whole, "samples.jsonl")[:40]
    assert losses(folder)[:30] == losses(whole)[:30]
    assert result.losses[0] == pytest.approx(
        losses(whole)[30], rel=1e-6
    )  # the same weights, another order of sums
    assert result.losses == pytest.approx(losses(whole)[30:40], rel=1e-4)
    rates = [entry["lr"] for entry in lines(folder, "metrics.jsonl")]
    assert rates == [0.02 * 0.95**step for step in range(40)]


def test_a_damaged_checkpoint_is_passed_over_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    whole = plait.train(jobs.plain(), ranks=1, out=tmp_path / "whole")
    plait.train(jobs.plain(), ranks=1, steps=2, out=folder)
    plait.resume(folder, 1, job=jobs.plain(), steps=4, out=folder)
    newest = folder / "checkpoints" / "step-00000004" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    assert jobs.cli("run", jobs.reference("plain"), "--resume", folder, "--ranks", "1") == 0
    told = capsys.readouterr().out
    assert "step-00000004 is passed over" in told
    assert "step-00000002 is used" in told
    assert losses(folder) == list(whole.losses)


def test_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    done = plait.train(jobs.plain(), ranks=1, out=folder)
    assert jobs.cli("run", jobs.reference("plain"), "--resume", folder) == 0
    assert "step 4 of 4 was reached before" in capsys.readouterr().out
    assert losses(folder) == list(done.losses)


def test_until_remembers_its_patience(tmp_path: Path) -> None:
    """Two evaluations without improvement before the end and one after it make three."""
    job = replace(
        jobs.dropout(),
        epochs=None,
        evaluate_every=2,
        schedule=lambda step: 0.0,
        until=plait.Until(patience=3),
    )
    job = replace(job, model=lambda: torch.nn.Linear(16, 10))
    first = plait.train(job, ranks=1, steps=6, out=tmp_path / "run")
    assert first.stopped is None
    second = plait.resume(tmp_path / "run", 1, job=job, steps=50, out=tmp_path / "run")
    assert len(second.losses) == 2
    assert second.stopped is not None


@pytest.mark.parametrize(("change", "told"), [({"seed": 7}, "seed=0"), ({"batch": 8}, "batch=16")])
def test_another_run_is_not_taken_for_the_same(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    plait.train(jobs.plain(), ranks=1, steps=2, out=tmp_path / "run")
    with pytest.raises(UsageError, match=told):
        plait.resume(tmp_path / "run", 1, job=replace(jobs.plain(), **change), out=tmp_path / "run")


def test_what_has_changed_since_is_told(tmp_path: Path) -> None:
    told: list[str] = []

    def hear(event: dict[str, Any]) -> None:
        told.extend([event["notice"]] if "notice" in event else [])

    run = tmp_path / "run"
    plait.train(jobs.plain(), ranks=1, out=run, saving=plait.Saving(trace=False))
    longer = replace(jobs.plain(), data=jobs.samples(70), epochs=None, steps=6)
    plait.resume(
        run, 1, job=longer, out=run, saving=plait.Saving(trace=False), watching=plait.Watching(listener=hear)
    )
    assert any("the data is 70 samples and was 64 samples" in line for line in told), told
    assert "resume: the run ends with steps=6; it was begun with epochs=1." in told
    told.clear()
    plait.resume(
        run, 1, job=longer, out=run, saving=plait.Saving(trace=False), watching=plait.Watching(listener=hear)
    )
    assert not any(line.startswith("resume: ") for line in told), told


def test_another_model_is_refused(tmp_path: Path) -> None:
    plait.train(jobs.plain(), ranks=1, steps=2, out=tmp_path / "run")
    job = replace(jobs.plain(), model=lambda: torch.nn.Linear(16, 10, bias=False))
    with pytest.raises(CheckpointError, match="bias"):
        plait.resume(tmp_path / "run", 1, job=job, out=tmp_path / "run")


# --- saves that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_complaint_12_a_full_disk_loses_no_checkpoint(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, state: Any, **options: Any) -> Path:
        if state.step >= 3:
            raise CheckpointError(
                f"the checkpoint of step {state.step} cannot be written: No space left on device"
            )
        return save_checkpoint(folder, state, **options)

    monkeypatch.setattr(checkpoint_saver, "save_checkpoint", full)
    events: list[dict[str, Any]] = []
    folder = tmp_path / "run"
    plait.train(jobs.plain(), ranks=ranks, steps=2, out=folder)
    with pytest.raises(CheckpointError, match="last checkpoint was not saved: .*step 4 .*No space left"):
        plait.resume(
            folder, ranks, job=jobs.plain(), out=folder, watching=plait.Watching(listener=events.append)
        )
    assert load_checkpoint(tmp_path / "run").step == 2
    assert len(losses(tmp_path / "run")) == 4  # training went on
    assert any("step 4 cannot be written" in event.get("notice", "") for event in events)


def test_complaint_12_a_slow_save_is_reported_and_never_a_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(folder: Path, state: Any, **options: Any) -> Path:
        time.sleep(3)
        return save_checkpoint(folder, state, **options)

    monkeypatch.setattr(checkpoint_saver, "save_checkpoint", slow)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="not written after"):
        plait.train(
            jobs.plain(), ranks=2, out=tmp_path / "run", saving=plait.Saving(checkpoint_timeout_s=0.5)
        )
    assert time.monotonic() - began < 60


# --- export -------------------------------------------------------------------------------------------------


def test_complaint_17_tied_weights_are_exported_once_and_load_anywhere(tmp_path: Path) -> None:
    job = ZOO["gpt_tied"].job(steps=2)
    result = plait.train(job, ranks=2, out=tmp_path / "run")
    assert jobs.cli("export", tmp_path / "run", "--to", "safetensors") == 0
    assert jobs.cli("export", tmp_path / "run", "--to", "state_dict", "--out", tmp_path / "weights.pt") == 0
    saved = load_file(tmp_path / "run" / "weights.safetensors")
    assert ("tokens.weight" in saved) != ("head.weight" in saved)
    state_dict = torch.load(tmp_path / "weights.pt", weights_only=True)
    for weights in (state_dict, result.weights):
        model = ZOO["gpt_tied"].model()
        model.load_state_dict(weights, strict=True)
        only = saved["tokens.weight" if "tokens.weight" in saved else "head.weight"]
        assert torch.equal(model.state_dict()["head.weight"], only)


def test_export_takes_the_folder_of_one_checkpoint(tmp_path: Path) -> None:
    plait.train(jobs.plain(), ranks=1, steps=2, out=tmp_path / "run")
    shutil.move(tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "step-00000002")
    assert jobs.cli("export", tmp_path / "step-00000002", "--out", tmp_path / "two.safetensors") == 0
    assert set(load_file(tmp_path / "two.safetensors")) == {"weight", "bias"}
