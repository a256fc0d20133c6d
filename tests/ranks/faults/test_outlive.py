"""Runs that go on with the ranks, and the hosts, that are left: with the samples of an undisturbed run."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.ranks import jobs
from tests.ranks.hosts.hosts import environment
from torch import Tensor

import plait
from plait import Job
from plait.errors import WorkerError
from plait.files.records import read_records
from plait.report.record import read_run

pytestmark = pytest.mark.timeout(180)


class Deadly(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples of which some kill whoever reads them, each once."""

    def __init__(self, folder: Path, deadly: tuple[int, ...]) -> None:
        self._samples, self._folder, self._deadly = jobs.samples(), folder, deadly

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self._deadly:
            try:
                (self._folder / f"{index}.dead").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                time.sleep(0.05)  # the loader reads ahead of the step that the others are in
                os.kill(os.getpid(), signal.SIGKILL)
        return self._samples[index]


def _job(folder: Path, *steps: int) -> Job:
    """Whoever reads the first sample of one of these steps dies of it."""
    order = jobs.dropout().order(jobs.NUM_SAMPLES)
    assert order is not None
    deadly = tuple(int(order.at(step).ids[0]) for step in steps)
    return replace(jobs.dropout(), data=Deadly(folder, deadly), evaluate=None, metrics=None)


def _trained(job: Job, out: Path, plan: str, **more: Any) -> tuple[plait.Result, list[dict[str, Any]]]:
    saving = plait.Saving(record_samples=True, checkpoint_every=2)
    result = plait.train(
        job, plan, out=out, saving=saving, watching=plait.Watching(listener=lambda event: None), **more
    )
    outlived = out / "outlived.json"
    return result, json.loads(outlived.read_text()) if outlived.exists() else []


def _ids(folder: Path) -> list[Any]:
    return [(entry["step"], entry["ids"]) for entry in read_records(folder / "samples.jsonl").entries]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> plait.Result:
    return _trained(_job(tmp_path_factory.mktemp("none")), tmp_path_factory.mktemp("runs") / "run", "single")[
        0
    ]


def test_copies_go_on_from_memory_twice(undisturbed: plait.Result, tmp_path: Path) -> None:
    deadly, ranks = (4, 6), 4
    limits = plait.Limits(elastic="2:4")
    result, events = _trained(_job(tmp_path, *deadly), tmp_path / "run", "ddp", ranks=ranks, limits=limits)
    assert [event["source"] for event in events] == ["memory"] * len(deadly)
    assert all(event["repeated_steps"] == 0 and event["took_s"] < 60 for event in events)
    assert _ids(result.folder) == _ids(undisturbed.folder)
    torch.testing.assert_close(result.losses, undisturbed.losses, rtol=1e-4, atol=1e-5)
    assert f"data={ranks - len(deadly)}" in events[-1]["plan"]
    assert "SIGKILL" in " ".join(read_run(result.folder).notes)


@pytest.mark.parametrize(
    ("plan", "settings", "ranks"),
    [
        ("local-sgd", {"average": {"every": 2}}, 3),
        ("diloco", {"average": {"every": 2}}, 3),
        ("easgd", {"elastic": {"variant": "sync", "tau": 2}}, 3),
        ("server-sync", {}, 4),
        ("server-stale", {}, 4),
    ],
)
def test_workers_that_meet_now_and_then_and_servers_go_on_from_memory(
    plan: str, settings: dict[str, Any], ranks: int, undisturbed: plait.Result, tmp_path: Path
) -> None:
    """From what workers agreed on when they met last; from all that the only server holds. Nothing was saved."""
    saving = plait.Saving(record_samples=True, checkpoint_every=1000)
    result = plait.train(
        _job(tmp_path, 5),
        plan,
        ranks,
        changes=plait.Changes(settings=settings),
        out=tmp_path / "run",
        saving=saving,
        limits=plait.Limits(elastic="2:4"),
        watching=plait.Watching(listener=lambda event: None),
    )
    (event,) = json.loads((tmp_path / "run" / "outlived.json").read_text())
    assert event["source"] == "memory" and event["step"] > 0, event
    assert event["repeated_steps"] <= (0 if plan.startswith("server") else 4)
    ids = [(step, sorted(found)) for step, found in _ids(result.folder)]
    assert ids == [(step, sorted(found)) for step, found in _ids(undisturbed.folder)]
    if plan == "server-sync":  # computes what one process does, whoever is lost
        torch.testing.assert_close(result.losses, undisturbed.losses, rtol=1e-4, atol=1e-5)


def test_a_pipeline_of_four_becomes_what_is_best_for_three(undisturbed: plait.Result, tmp_path: Path) -> None:
    limits = plait.Limits(elastic="2:4")
    job = _job(tmp_path, 4)
    result, events = _trained(job, tmp_path / "run", "1f1b", ranks=4, limits=limits)
    assert events[0]["source"] != "memory"
    assert events[0]["before"].startswith("pipe=4") and events[0]["plan"] != events[0]["before"]
    assert _ids(result.folder) == _ids(undisturbed.folder)
    torch.testing.assert_close(result.losses, undisturbed.losses, rtol=1e-4, atol=1e-5)


def test_too_few_are_left(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="SIGKILL.*1 of 2 ranks are left, --elastic wants 2"):
        _trained(_job(tmp_path, 4), tmp_path / "run", "ddp", ranks=2, limits=plait.Limits(elastic="2:2"))


def test_a_host_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Two hosts of two ranks; one is killed with all that it runs, started again, and taken in."""
    out = tmp_path / "run"
    (tmp_path / "job.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(jobs.HERE.parents[2])!r})\n"
        "from dataclasses import replace\nfrom pathlib import Path\nfrom tests.ranks import jobs\n"
        f"over = Path({str(tmp_path / 'over')!r})\n"
        "def job():\n"
        "    data = jobs.Marked(None, lambda: time.sleep(0 if over.exists() else 0.01))\n"
        "    return replace(jobs.plain(), data=data, epochs=None, steps=600)\n"
    )
    run = ["run", str(tmp_path / "job.py"), "--plan", "ddp", "--ranks", "4", "--elastic", "2:4"]
    shared = {"PLAIT_TASKS": "2", "PLAIT_FIRST_ADDRESS": "127.0.0.1", "PLAIT_RUN_ID": str(tmp_path)}

    def start(task: int) -> "subprocess.Popen[str]":
        return forked.plait(
            *run, "--out", out, "--record-samples", "--no-trace", cwd=tmp_path, start_new_session=True,
            stderr=subprocess.STDOUT,
            environment=environment(
                **shared, PLAIT_TASK=str(task), PLAIT_TOKEN="0123456789abcdef" * 2, PLAIT_SEND_FILES="1"
            ),
        )  # fmt: skip

    def wait_for(path: Path, text: str) -> None:
        while not path.exists() or text not in path.read_text():
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.05)

    first, second = start(0), start(1)
    tasks = [first, second]
    try:
        wait_for(out / "metrics.jsonl", '"step": 9,')
        os.killpg(second.pid, signal.SIGKILL)
        wait_for(out / "outlived.json", "memory")
        tasks.append(start(1))
        wait_for(out / "outlived.json", "hosts came back")
        (tmp_path / "over").touch()
        said = first.communicate(timeout=120)[0]
        assert first.returncode == 0, said
        assert tasks[2].wait(30) == 0
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
            task.wait()
            assert task.stdout is not None
            task.stdout.close()
    lost, back = json.loads((out / "outlived.json").read_text())
    assert (lost["plan"], back["plan"]) == ("data=2", "data=4")
    assert lost["repeated_steps"] == back["repeated_steps"] == 0
    order = replace(jobs.plain(), epochs=None, steps=600).order(64)
    assert order is not None
    assert _ids(out) == [(step, [int(n) for n in order.at(step).ids]) for step in range(600)]
