"""CONTRIBUTING's "Adding a plan", followed from outside: a function that returns a plan, and how its workers agree."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.ranks import jobs
from tests.unit.run.loop.averaging_reference import Workers, workers_of
from tests.unit.run.training import case_job

import plait
from plait.cluster.parse import parse_cluster
from plait.plan.agreement import AGREEMENTS, Agreement
from plait.plan.decisions import Average, Elastic, Sync
from plait.plan.mesh import Mesh
from plait.plan.named import NAMED, resolve
from plait.plan.plan import DATA, Plan
from plait.program.check.soundness import check_program
from plait.program.instructions import Compute
from plait.program.simulate.simulator import simulate
from plait.report.record import read_run
from plait.run.checkpoint.store import load_checkpoint
from plait.run.measure.predict import predict_job
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks
from plait.run.verify import verify

pytestmark = pytest.mark.timeout(120)


def doubling(ranks: int) -> Plan:
    """Workers train on their own and average after the steps 1, 2, 4, 8, ...: often while they learn most."""
    return Plan(name="doubling", mesh=Mesh(axes=((DATA, ranks),)), sync=Sync(rule="doubling"))


def _due(step: int, ends_epoch: bool) -> tuple[int, ...]:
    return (0,) if step & (step + 1) == 0 else ()


def _agreement(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return Agreement(alone=True, mix="mean", due=_due, round=None)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("plait.plan.named.NAMED", {**NAMED, "doubling": doubling})
    monkeypatch.setattr("plait.plan.plan.AGREEMENTS", {**AGREEMENTS, "doubling": _agreement})
    before = jobs.children()
    yield
    assert jobs.children() <= before


def test_it_is_compiled_checked_simulated_and_priced() -> None:
    job = case_job("mlp", torch.float32, steps=8, batch=6, num_samples=48)
    plan = resolve("doubling", 3)
    programs = prepare(job, plan, "cpu", torch.float32, lambda event: None)
    steps = programs.round()
    assert len(steps) == 8
    meets = [any(i.name.startswith("all_reduce weights") for i in p.of(0).instructions) for p in steps]
    assert meets == [True, True, False, True, False, False, False, True]
    for program in steps:
        check_program(program)
    slow = lambda rank, i: (3.0 if rank == 1 else 1.0) if isinstance(i, Compute) else 0.0  # noqa: E731
    trace = simulate(steps, slow, steps=8)
    count = sum(isinstance(i, Compute) for i in steps[0].of(0).instructions)
    ends = {span.step: span.end_s for span in trace.spans if span.rank == 0}
    assert [ends[step] for step in (0, 2, 3, 7)] == [3 * count, 7 * count, 12 * count, 24 * count]
    found = predict_job(job, plan, parse_cluster("1x4xA100")).exact.prediction
    ddp = predict_job(job, resolve("ddp", 3), parse_cluster("1x4xA100")).exact.prediction
    assert 0 < found.sent_bytes[DATA] < 0.6 * ddp.sent_bytes[DATA]


def test_all_ranks_in_one_process_equal_its_equations() -> None:
    job = case_job("mlp", torch.float64, steps=8, batch=6, num_samples=48)
    programs = prepare(job, resolve("doubling", 2), "cpu", torch.float64, lambda event: None)
    ranks, written = SerialRanks(job, programs, torch.float64), workers_of(job, 2)
    assert isinstance(written, Workers)
    for step in range(8):
        assert ranks.run(step)
        written.step(step)
        if step in (0, 1, 3, 7):
            written.take(written.mean())
        for machine, model in zip(ranks.machines, written.models, strict=True):
            for name, value in model.named_parameters():
                torch.testing.assert_close(
                    machine.state.parameters[name].detach(), value.detach(), rtol=1e-10, atol=1e-12
                )


def test_real_processes_run_verify_save_and_report_it(tmp_path: Path) -> None:
    found = verify(jobs.dropout(), "doubling", 2, steps=3)
    assert found.ok, found.first
    assert "each of 2 workers train on its own share" in " ".join(found.notices)
    folder = tmp_path / "run"
    plait.train(jobs.plain(), "doubling", 2, steps=5, out=folder)
    found_run = read_run(folder)
    assert (
        "plan: doubling" in str(found_run.plan)
        and len(found_run.metrics) == 5
        and found_run.trace is not None
    )
    after = plait.resume(folder, 2, job=jobs.plain(), plan="ddp", steps=6, out=folder)
    assert len(after.losses) == 1 and load_checkpoint(folder).step == 6
