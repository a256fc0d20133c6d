"""Parameter servers in real processes: what they compute, how old weights get, who may die, and checkpoints."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import jobs
from torch import nn

import plait
from plait.errors import WorkerError
from plait.job.job import Job
from plait.run.checkpoint.store import load_checkpoint
from plait.run.proof.reference import Reference, reference_of
from plait.run.verify import verify

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("leaves_no_process")]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(jobs.dropout(), steps=3)


@pytest.mark.parametrize(
    ("plan", "ranks", "settings"),
    [
        ("server-sync", 4, {"servers": 2, "bucket_mib": 0.001}),
        ("server-async", 3, {"servers": 2}),
        ("server-stale", 2, {}),
    ],
)
def test_processes_compute_what_one_does(
    plan: str, ranks: int, settings: dict[str, Any], reference: Reference
) -> None:
    found = verify(jobs.dropout(), plan, ranks, settings={"sync": settings}, against=reference)
    assert found.ok, found.first


def test_messages_go_through_the_store_where_no_memory_is_shared(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.run.link.posts.share_memory", lambda *_: None)
    found = verify(jobs.dropout(), "server-sync", 4, settings={"sync": {"servers": 2}}, against=reference)
    assert found.ok, found.first


def totals(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "totals.json").read_text())
    return found


def test_complaint_24_weights_are_never_older_than_the_bound(tmp_path: Path) -> None:
    job = replace(jobs.plain(), steps=40, epochs=None)
    plait.train(
        job,
        "server-stale",
        3,
        out=tmp_path,
        changes=plait.Changes(settings={"sync": {"staleness": 2}}),
        trial=plait.Trial(slow={0: 20.0}),
        saving=plait.Saving(trace=False),
    )
    ages = {int(age): count for age, count in totals(tmp_path)["staleness"].items()}
    assert sum(ages.values()) == 80
    assert max(ages) == 2  # reached by the quick worker, and never passed
    assert totals(tmp_path)["updates"] == 40


def test_a_slow_worker_takes_fewer_shares_and_none_is_lost(tmp_path: Path) -> None:
    job = replace(jobs.plain(), steps=40, epochs=None)
    plait.train(
        job,
        "server-async",
        3,
        out=tmp_path,
        trial=plait.Trial(slow={0: 20.0}),
        saving=plait.Saving(record_samples=True, trace=False),
    )
    found = totals(tmp_path)
    assert found["updates"] == sum(found["shares_by_worker"].values()) == 80
    assert found["shares_by_worker"]["0"] < found["shares_by_worker"]["1"]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    order = job.order(64)
    assert order is not None
    assert {entry["step"]: entry["ids"] for entry in samples} == {
        s: order.at(s).ids.tolist() for s in range(40)
    }


class KillsAt:
    """A listener that kills a rank once a step was told of; None: it interrupts the run."""

    def __init__(self, rank: int | None, step: int) -> None:
        self._rank, self._step = rank, step
        self._before = jobs.children()
        self.notices: list[str] = []
        self.killed_s = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        if "notice" in event and not event["notice"].startswith("capture checked"):
            self.notices.append(event["notice"])
        if event.get("metrics", {}).get("step", 0) >= self._step and not self.killed_s:
            self.killed_s = time.monotonic()
            if self._rank is None:
                os.kill(os.getpid(), signal.SIGINT)
                return
            forked = Path("/proc/self/cmdline").read_bytes()  # unlike the run's guardian
            pids = sorted(
                pid
                for pid in jobs.children() - self._before
                if Path(f"/proc/{pid}/cmdline").read_bytes() == forked
            )  # started in the order of ranks
            os.kill(pids[self._rank], signal.SIGKILL)


def slow_job() -> Job:
    """Long enough for something to happen to it."""
    return replace(jobs.plain(), data=jobs.Marked(None, lambda: time.sleep(0.001)), epochs=None, steps=60)


@pytest.mark.parametrize("plan", ["server-async", "server-stale"])
def test_a_dead_worker_does_not_stop_the_others(plan: str, tmp_path: Path) -> None:
    kill = KillsAt(rank=1, step=5)
    result = plait.train(
        slow_job(),
        plan,
        3,
        out=tmp_path,
        watching=plait.Watching(listener=kill),
        saving=plait.Saving(trace=False),
    )
    assert len(result.losses) == 60
    assert load_checkpoint(tmp_path).step == 60
    told, *named = kill.notices
    assert "rank 1 of 3 was killed by SIGKILL" in told
    found = totals(tmp_path)["shares_by_worker"]
    lost = 120 - sum(found.values())
    assert [text.partition(" of step(s)")[0] for text in named] == ([f"{lost} share(s)"] if lost else [])
    if plan == "server-async":
        assert lost <= 2  # what it computed on, and what it had loaded
        assert "take over its data" in told
    else:
        assert found["0"] == 60 and lost > 10
        assert "not trained on" in told


def test_complaint_24_a_dead_server_ends_the_run_with_a_way_back(tmp_path: Path) -> None:
    kill = KillsAt(rank=2, step=40)
    with pytest.raises(WorkerError) as caught:
        plait.train(
            replace(slow_job(), steps=3000),
            "server-async",
            3,
            out=tmp_path,
            watching=plait.Watching(listener=kill),
            saving=plait.Saving(checkpoint_every=10, trace=False),
        )
    assert time.monotonic() - kill.killed_s < 10
    assert "a server is gone" in caught.value.what
    assert f"--resume {tmp_path}" in str(caught.value.fix)
    saved = load_checkpoint(tmp_path).step
    assert saved >= 10 and saved % 10 == 0
    assert f"step-{saved:08d}" in str(caught.value.fix)
    steps = replace(slow_job(), steps=saved + 4)
    result = plait.resume(tmp_path, 2, job=steps, plan="ddp", out=tmp_path, saving=plait.Saving(trace=False))
    assert len(result.losses) == 4


@pytest.mark.parametrize("plan", ["server-async", "server-stale"])
def test_an_interrupted_run_goes_on(plan: str, tmp_path: Path) -> None:
    stop = KillsAt(rank=None, step=5)
    stopped = plait.train(
        slow_job(),
        plan,
        3,
        out=tmp_path,
        watching=plait.Watching(listener=stop),
        saving=plait.Saving(trace=False),
    )
    assert stopped.stopped == "interrupted"
    saved = load_checkpoint(tmp_path).step
    assert 5 < saved < 60
    assert len(stopped.losses) in (
        saved - 1,
        saved,
    )  # of server-async, shares of the last step may be missing
    longer = replace(slow_job(), steps=saved + 3)
    plait.resume(tmp_path, 3, job=longer, plan=plan, out=tmp_path, saving=plait.Saving(trace=False))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted({line["step"] for line in lines})[-3:] == [saved, saved + 1, saved + 2]


@pytest.mark.parametrize(
    ("plan", "settings"),
    [("server-stale", {}), ("easgd", {"elastic": {"variant": "round-robin", "tau": 1}})],
)
def test_without_worker_0_an_interrupted_run_ends_and_is_saved(
    plan: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """It is worker 0 who says which step is the last."""
    kill, stop = KillsAt(rank=0, step=3), KillsAt(rank=None, step=10)

    def listen(event: dict[str, Any]) -> None:
        kill(event)
        if kill.notices:  # its death was told
            stop(event)

    stopped = plait.train(
        slow_job(),
        plan,
        3,
        out=tmp_path,
        watching=plait.Watching(listener=listen),
        changes=plait.Changes(settings=settings),
        saving=plait.Saving(trace=False),
    )
    assert "rank 0 of 3 was killed" in kill.notices[0]
    assert stopped.stopped == "interrupted"
    assert 10 < load_checkpoint(tmp_path).step < 60


def run(job: Job, plan: str, ranks: int, out: Path, resume: Path | None = None, **settings: Any) -> None:
    options: dict[str, Any] = {
        "job": job, "plan": plan, "ranks": ranks, "out": out, "saving": plait.Saving(trace=False),
        "changes": plait.Changes(settings={"sync": settings}),
    }  # fmt: skip
    if resume is None:
        plait.train(**options)
    else:
        plait.resume(resume, **options)


def test_checkpoints_go_to_ddp_and_back(tmp_path: Path) -> None:
    job = replace(jobs.plain(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02))
    parts = [replace(job, steps=steps, epochs=None) for steps in (4, 8, 11)]
    run(parts[2], "ddp", 2, tmp_path / "whole")
    run(parts[0], "server-sync", 4, tmp_path / "a", servers=2)
    run(parts[1], "ddp", 2, tmp_path / "b", tmp_path / "a")
    run(parts[2], "server-sync", 3, tmp_path / "c", tmp_path / "b")
    whole, joined = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "c")
    assert joined.step == 11
    for name, tensor in whole.parameters.items():  # sums in another order, amplified by 11 steps of AdamW
        assert (tensor - joined.parameters[name]).abs().max() < 2e-5, name


def test_a_goal_ends_all_workers(tmp_path: Path) -> None:
    goal = plait.Until(metric="accuracy", target=0.0, mode="max")
    job = replace(
        jobs.plain(),
        epochs=50,
        until=goal,
        evaluate=lambda: jobs.samples(31),
        metrics={"accuracy": jobs.right},
    )
    result = plait.train(job, "server-async", 3, out=tmp_path, saving=plait.Saving(trace=False))
    assert result.stopped is not None and "accuracy reached" in result.stopped
    assert len(result.losses) < 50 * 4
    assert result.evaluation["accuracy"] >= 0.0


class Remembers(nn.Sequential):
    """Keeps numbers in Python, which no capture can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        self.largest = max(float(y.max()), getattr(self, "largest", 0.0))
        return 2 * y if self.largest > 1e9 else y


def test_a_model_that_runs_eagerly(tmp_path: Path) -> None:
    plain = jobs.plain()
    job = replace(plain, model=lambda: Remembers(plain.build_model()), steps=5, epochs=None)
    told = plait.train(job, "ddp", 2, out=tmp_path / "ddp", saving=plait.Saving(trace=False)).notices
    assert any("running eagerly" in notice for notice in told)
    plait.train(job, "server-sync", 3, out=tmp_path / "server", saving=plait.Saving(trace=False))
    one, other = load_checkpoint(tmp_path / "ddp"), load_checkpoint(tmp_path / "server")
    for name, tensor in one.parameters.items():
        assert (tensor - other.parameters[name]).abs().max() < 1e-6
