"""Callbacks around a run, checkpoints that are kept, and logs for other tools."""

import csv
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.api.display.loggers import LOGS
from plait.callbacks import Callbacks
from plait.errors import JobError, UsageError
from plait.run.checkpoint.store import load_checkpoint

STEPS, BATCH, EPOCHS = 4, 4, 2


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def job(**changes: Any) -> plait.Job:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS * BATCH, 6, generator=generator)
    samples = [(row, int(row[:3].argmax())) for row in inputs]
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(6, 3), "data": samples, "loss": nn.CrossEntropyLoss(), "batch": BATCH,
        "epochs": EPOCHS, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5), "evaluate": samples,
        "metrics": {"accuracy": accuracy}, "clip_norm": 1.0,
    }  # fmt: skip
    return plait.Job(**given | changes)


class Recorder(plait.Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_start(self, event: plait.Started) -> None:
        self.heard.append(event)

    def on_step(self, event: plait.StepDone) -> None:
        self.heard.append(event)

    def on_evaluation(self, event: plait.Evaluated) -> None:
        self.heard.append(event)

    def on_epoch(self, event: plait.EpochDone) -> None:
        self.heard.append(event)

    def on_save(self, event: plait.Saved) -> None:
        self.heard.append(event)

    def on_failure(self, event: plait.Failed) -> None:
        self.heard.append(event)

    def on_end(self, event: plait.Ended) -> None:
        self.heard.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("ddp", 2), ("hogwild", 2), ("server-sync", 3)])
def test_callbacks_hear_of_everything_once(plan: str, ranks: int, tmp_path: Path) -> None:
    recorder = Recorder()
    saving = plait.Saving(checkpoint_every=3, keep=1, trace=False)
    result = plait.train(
        job(),
        plan,
        ranks,
        out=tmp_path / "run",
        saving=saving,
        watching=plait.Watching(callbacks=[recorder]),
    )
    steps = sorted(
        recorder.of(plait.StepDone), key=lambda event: event.step
    )  # free workers end them in any order
    assert [event.step for event in steps] == list(range(STEPS * EPOCHS))
    assert [event.loss for event in steps] == list(result.losses)
    assert all(event.lr == 0.5 and event.samples_per_s > 0 for event in steps)
    assert [event.step for event in recorder.of(plait.EpochDone)] == [STEPS - 1, 2 * STEPS - 1]
    assert recorder.of(plait.Evaluated)[-1].metrics == result.evaluation
    started, ended = recorder.of(plait.Started), recorder.of(plait.Ended)
    assert [(one.folder, one.start_step, one.total_steps) for one in started] == [
        (result.folder, 0, STEPS * EPOCHS)
    ]
    assert recorder.heard[0] is started[0]
    assert recorder.heard[-1] is ended[0]
    assert ended[0].stopped is None
    saved = recorder.of(plait.Saved)
    assert saved[-1].step == STEPS * EPOCHS
    assert saved[-1].path.is_dir()
    on_disk = {path.name for path in (result.folder / "checkpoints").iterdir()}
    told = {name for event in saved for name in event.deleted}
    assert on_disk == {saved[-1].path.name}
    assert told | on_disk == {event.path.name for event in saved}, "what is deleted is told"


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("ddp", 2), ("hogwild", 2)])
def test_a_callback_ends_the_run_with_a_checkpoint(plan: str, ranks: int, tmp_path: Path) -> None:
    class Enough(plait.Callback):
        def on_step(self, event: plait.StepDone) -> plait.Stop | None:
            return plait.Stop(reason="it is enough") if event.step >= 2 else None

    result = plait.train(
        job(epochs=200),
        plan,
        ranks,
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
        watching=plait.Watching(callbacks=[Enough()]),
    )
    assert result.stopped == "it is enough"
    assert 3 <= len(result.losses) < 200 * STEPS
    assert load_checkpoint(result.folder).step >= 3


def test_a_callback_that_raises_is_told_and_not_called_again(tmp_path: Path) -> None:
    told: list[str] = []

    class Broken(plait.Callback):
        calls = 0

        def on_step(self, event: plait.StepDone) -> None:
            self.calls += 1
            raise ValueError("no such file")

    broken, recorder = Broken(), Recorder()
    plait.train(
        job(),
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
        watching=plait.Watching(
            callbacks=[broken, recorder], listener=lambda event: told.append(event.get("notice", ""))
        ),
    )
    assert broken.calls == 1
    assert len(recorder.of(plait.StepDone)) == STEPS * EPOCHS
    assert [text for text in told if text.startswith("Broken.on_step raised ValueError: no such file.")]
    assert "no such file" in (tmp_path / "run" / "callbacks.txt").read_text()


def test_a_failed_run_is_told(tmp_path: Path) -> None:
    class Sudden(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 11:
                raise OSError("gone")
            return super().__getitem__(index)

    recorder = Recorder()
    samples = Sudden((torch.randn(6), 0) for _ in range(16))
    with pytest.raises(Exception, match="gone") as caught:
        plait.train(
            job(data=samples, evaluate=None, metrics=None),
            out=tmp_path / "run",
            saving=plait.Saving(trace=False),
            watching=plait.Watching(callbacks=[recorder]),
        )
    assert [event.error for event in recorder.of(plait.Failed)] == [caught.value]
    assert not recorder.of(plait.Ended)


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    """Held-out labels are all wrong, so that the first evaluation is the best; also when the run is resumed."""
    wrong = [(row, (label + 1) % 3) for row, label in job().data]
    recorder = Recorder()
    saving = plait.Saving(checkpoint_every=1, keep=1, keep_best="loss", trace=False)
    options: dict[str, Any] = {
        "saving": saving,
        "watching": plait.Watching(callbacks=[recorder]),
        "out": tmp_path / "run",
    }
    folder = plait.train(job(evaluate=wrong), "ddp", 2, steps=STEPS + 2, **options).folder
    measured = {event.step + 1: event.metrics["loss"] for event in recorder.of(plait.Evaluated)}
    best = min(measured, key=lambda step: measured[step])
    assert best == STEPS

    def kept() -> list[str]:
        return sorted(path.name for path in (folder / "checkpoints").iterdir())

    assert kept() == [f"step-{best:08d}", f"step-{STEPS + 2:08d}"]
    assert [event.step for event in recorder.of(plait.Saved) if event.is_best] == [best]
    plait.resume(folder, 2, job=job(evaluate=wrong), plan="ddp", **options)
    assert kept() == [f"step-{best:08d}", f"step-{2 * STEPS:08d}"]


def test_what_cannot_be_kept_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for text, plan, changes, what in (
        ("speed", "single", {}, "not a metric of this job"),
        ("up:accuracy", "single", {}, "not a metric of this job"),
        ("loss", "single", {"evaluate": None, "metrics": None}, "no evaluation data"),
        ("loss", "hogwild", {}, "go on changing"),
    ):
        with pytest.raises(UsageError, match=what) as caught:
            plait.train(
                job(**changes), plan, 2 if plan == "hogwild" else 1, out=tmp_path / "run",
                saving=plait.Saving(keep_best=text),
            )  # fmt: skip
        assert caught.value.fix
    with pytest.raises(UsageError, match="would delete"):
        plait.Saving(keep=0)
    assert not (tmp_path / "run").exists()


def test_logs_hold_every_step_and_go_on_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, as users have them: wandb leaves threads behind."""
    for package in ("tensorboard", "wandb", "mlflow"):
        pytest.importorskip(package)
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_SILENT", "true"),
        ("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri()),
        ("MLFLOW_ALLOW_FILE_STORE", "true"),
    ):
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    once = f"{Path(__file__)}:job --steps {STEPS} --out {folder} --checkpoint-every 3 --log {','.join(LOGS)}"
    for options in (once, f"--resume {folder} --steps {STEPS * EPOCHS}"):
        ran = subprocess.run(
            [sys.executable, "-c", "from plait.cli.main import main; main()", "run", "--no-trace", *options.split()],
            capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "raised" not in ran.stdout
    losses = _losses(folder)
    assert len(losses) == STEPS * EPOCHS
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert [float(row["value"]) for row in rows if row["name"] == "loss"] == losses
    assert {row["name"] for row in rows} >= {"loss", "lr", "grad_norm", "evaluation/accuracy"}
    assert _tensorboard(folder) == dict(enumerate(losses))
    from mlflow import MlflowClient

    history = MlflowClient().get_metric_history((folder / "mlflow-run").read_text().strip(), "loss")
    assert {one.step: one.value for one in history} == dict(enumerate(losses))
    assert list((folder / "wandb").glob("offline-run-*")), "a run of wandb"


def _losses(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def _tensorboard(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in found.Scalars("loss")}


def started(folder: Path, start_step: int) -> dict[str, Any]:
    return {"started": str(folder), "start_step": start_step, "total_steps": None}


@pytest.mark.parametrize("name", ["callbacks.txt", "metrics.csv"])
def test_a_folder_that_was_handed_over_is_no_way_to_other_files(name: str, tmp_path: Path) -> None:
    class Failing(plait.Callback):
        def on_start(self, event: plait.Started) -> None:
            raise ValueError("of no use")

    secret, folder, told = tmp_path / "secret", tmp_path / "run", list[Any]()
    secret.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(secret)
    log = LOGS["csv"]()
    Callbacks([Failing(), log], told.append)(started(folder, 0))
    log.close(failed=False)
    assert secret.read_text() == "precious"
    assert (
        "Failing.on_start raised ValueError: of no use." in told[-1]["notice"]
    )  # though it stands nowhere else


def test_numbers_of_a_csv_file_stay_where_there_is_no_room_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = "step,name,value\r\n0,loss,1.0\r\n1,loss,0.5\r\n"
    (tmp_path / "metrics.csv").write_bytes(before.encode())

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[Any] = []
    monkeypatch.setattr(os, "fsync", full)
    Callbacks([LOGS["csv"]()], told.append)(started(tmp_path, 1))
    assert "No space left on device" in told[-1]["notice"]
    assert (tmp_path / "metrics.csv").read_bytes() == before.encode()


def test_a_log_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--log excel is not known"):
        plait.train(job(), out=tmp_path / "run", saving=plait.Saving(log="csv,excel"))
    monkeypatch.setattr(LOGS["wandb"], "needs", "no_such_module")
    with pytest.raises(UsageError, match="not installed") as caught:
        plait.train(job(), out=tmp_path / "run", saving=plait.Saving(log="wandb"))
    assert "plait[wandb]" in str(caught.value.fix)
    assert not (tmp_path / "run").exists()


def test_progress_is_shown_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plait.train(job(), out=tmp_path / "silent", saving=plait.Saving(trace=False))
    assert capsys.readouterr().err == ""
    plait.train(
        job(),
        out=tmp_path / "shown",
        saving=plait.Saving(trace=False),
        watching=plait.Watching(progress=True),
    )
    assert f"step {STEPS * EPOCHS}/{STEPS * EPOCHS}  loss" in capsys.readouterr().err


def test_train_refuses_what_is_no_job() -> None:
    with pytest.raises(JobError):
        plait.train(None, watching=plait.Watching(progress=True))  # type: ignore[arg-type]


def test_a_result_has_history_and_model(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    given = job()
    result = plait.train(given, out=tmp_path / "run", saving=plait.Saving(trace=False))
    assert [entry["loss"] for entry in result.history if "loss" in entry] == list(result.losses)
    model = result.model
    assert not model.training
    measured = torch.stack([model(row).argmax() == label for row, label in given.data]).float().mean()
    assert float(measured) == pytest.approx(result.evaluation["accuracy"])
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers are as they were"


def test_a_method_that_would_never_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Mine.on_evaluate would never be called") as caught:
        type("Mine", (plait.Callback,), {"on_evaluate": lambda self, event: None})
    assert "did you mean 'on_evaluation'?" in str(caught.value)
