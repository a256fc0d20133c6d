"""Hogwild in real processes: one model, each sample once, checkpoints for any plan, and workers that die."""

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import jobs

import plait
from plait.run.checkpoint.store import load_checkpoint

pytestmark = pytest.mark.timeout(120)


def lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("shared", [False, True])
def test_two_workers_train_one_model(tmp_path: Path, shared: bool) -> None:
    job = replace(jobs.dropout(), epochs=4)
    settings = {"hogwild": {"shared_state": shared}}
    result = plait.train(
        job,
        "hogwild",
        2,
        out=tmp_path / "run",
        changes=plait.Changes(settings=settings),
        saving=plait.Saving(record_samples=True, checkpoint_every=5),
    )
    assert len(result.losses) == 4 * 7
    assert sum(result.losses[-7:]) < sum(result.losses[:7])  # by how much is a matter of luck
    for epoch in range(4):
        taken = sorted(
            n for line in lines(tmp_path / "run", "samples") if line["epoch"] == epoch for n in line["ids"]
        )
        assert taken == list(range(jobs.NUM_SAMPLES)), "each sample once an epoch"
    saved = load_checkpoint(tmp_path / "run")
    assert saved.step == 28
    counts = [float(entries["step"]) for entries in saved.optimizer.tensors.values()]
    # 28 steps of 2 shares (lost counts are part of the bargain); a worker's own state counts its own updates
    assert all(0 < count <= 56 for count in counts) if shared else all(0 < count < 56 for count in counts)
    inputs, labels = (torch.stack(column) for column in zip(*jobs.samples(jobs.NUM_SAMPLES), strict=True))
    untrained, trained = jobs.network().eval(), jobs.network().eval()
    trained.load_state_dict(result.weights)
    before, after = (F.cross_entropy(model(inputs), labels).item() for model in (untrained, trained))
    assert after < before, "the weights that come back are those that were trained"
    assert all(torch.equal(tensor, result.weights[name]) for name, tensor in saved.parameters.items())
    again = plait.resume(
        tmp_path / "run",
        2,
        job=replace(job, epochs=6),
        plan="ddp",
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
    )
    assert len(again.losses) == 14 and all(map(isfinite, again.losses))


def test_a_dead_worker_does_not_stop_the_other(tmp_path: Path) -> None:
    told: list[str] = []
    job = replace(jobs.killed(), epochs=1)
    result = plait.train(
        job,
        "hogwild",
        2,
        out=tmp_path / "run",
        saving=plait.Saving(record_samples=True, trace=False),
        watching=plait.Watching(listener=lambda event: told.append(str(event.get("notice", "")))),
    )
    assert any("SIGKILL" in notice and "go on" in notice for notice in told), told
    assert 3 <= len(result.losses) <= 4
    taken = [number for line in lines(tmp_path / "run", "samples") for number in line["ids"]]
    # A worker holds the share that it computes on and the one that it reads ahead, 8 samples each.
    assert len(taken) == len(set(taken)) and 64 - 2 * 8 <= len(taken) <= 64 - 8
    assert jobs.MARK not in taken
    assert load_checkpoint(tmp_path / "run").step == 4
