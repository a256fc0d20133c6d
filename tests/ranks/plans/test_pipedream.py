"""`pipedream` on real processes: what is written out in plain PyTorch, and a run that goes on from its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.run.pipeline.pipedream_reference import written_out
from tests.zoo import ZOO

import plait
from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.plan import PIPE
from plait.run.link import between
from plait.run.link.between import links_between
from plait.run.prepare.prepare import prepare
from plait.run.verify import verify

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]

ROUNDS, BATCH, MICRO_BATCHES = 2, 13, 6


def job_of(name: str, **changes: Any) -> Job:
    given: dict[str, Any] = {"batch": BATCH, "num_samples": ROUNDS * BATCH, "steps": ROUNDS, "shuffle": False}
    given |= {"optimizer": "adamw", "accumulate": MICRO_BATCHES}
    return ZOO[name].job(**(given | changes))


@pytest.mark.parametrize(
    ("name", "mesh", "share"),
    [
        ("gpt", {PIPE: 2}, True),
        ("masked_gpt", {PIPE: 2}, False),
        ("mlp", {PIPE: 3}, True),
        ("mlp", {PIPE: 2, "data": 2}, True),
        ("mlp", {PIPE: 2, "data": 2}, False),
    ],
)
def test_processes_compute_what_is_written_out(
    name: str, mesh: dict[str, int], share: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through shared memory and through sockets: messages may leave late, weights change early."""
    monkeypatch.setattr(between, "links_between", lambda *a, **k: links_between(*a, **k | {"share": share}))
    job, plan = job_of(name), resolve("pipedream", None, None, mesh)
    layout = prepare(job, plan, "cpu", torch.float64, lambda event: None).layout
    assert layout is not None
    stage_of = {parameter: owners[0] for parameter, owners in layout.owners.items()}
    expected = written_out(job, stage_of, mesh[PIPE], ROUNDS)
    found = plait.train(
        job, plan, out=tmp_path / "run", trial=plait.Trial(dtype="float64"), saving=plait.Saving(trace=False)
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for parameter, tensor in expected.weights.items():
        difference = float((tensor - found.weights[parameter]).abs().max())
        assert difference <= 1e-9 * max(float(tensor.abs().max()), 1e-3), parameter
    assert any("gradients are computed on weights that are some updates old" in n for n in found.notices)


def test_a_run_is_continued_from_the_flush_between_two_rounds(tmp_path: Path) -> None:
    whole = plait.train(
        job_of("mlp"), "pipedream", 2, out=tmp_path / "whole", saving=plait.Saving(trace=False)
    )
    plait.train(
        job_of("mlp"), "pipedream", 2, steps=1, out=tmp_path / "parts", saving=plait.Saving(trace=False)
    )
    rest = plait.resume(
        tmp_path / "parts",
        2,
        job=job_of("mlp"),
        plan="pipedream",
        out=tmp_path / "parts",
        saving=plait.Saving(trace=False),
    )
    assert rest.losses == whole.losses[1:]
    assert all(torch.equal(tensor, rest.weights[name]) for name, tensor in whole.weights.items())


def test_one_micro_batch_a_step_is_what_one_process_computes() -> None:
    found = verify(job_of("gpt", accumulate=1, batch=7), "pipedream", 2, steps=2)
    assert found.ok, found.first
    assert {entry.largest for entry in found.differences if entry.kind != "spread"} == {0.0}
