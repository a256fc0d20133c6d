"""Workers that average now and then, in real processes: saved, resumed, interrupted, moved to other plans."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.ranks import jobs
from torch import nn

import plait
from plait.errors import UsageError
from plait.plan.named import resolve
from plait.run.checkpoint.store import load_checkpoint
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks
from plait.run.verify import verify

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "local-sgd": ("local-sgd", {"average": {"every": 4, "warmup": 1}}),
    "diloco": ("diloco", {"average": {"every": 4, "fragments": 2}}),
    "easgd": ("easgd", {"elastic": {"variant": "sync", "tau": 3, "momentum": 0.5}}),
}
IN_TURN: dict[str, tuple[str, dict[str, Any]]] = {
    "easgd-in-turn": ("easgd", {"elastic": {"variant": "round-robin", "tau": 1}})
}
STEPS = 11
"""Ends in the middle of a round."""


@pytest.mark.parametrize("name", PLANS)
def test_processes_do_what_the_serial_interpreter_does_and_resume_exactly(name: str, tmp_path: Path) -> None:
    plan, settings = PLANS[name]
    job = replace(jobs.dropout(), steps=STEPS, epochs=None, evaluate_every=STEPS)
    given: dict[str, Any] = {
        "changes": plait.Changes(settings=settings),
        "trial": plait.Trial(dtype="float64"),
        "saving": plait.Saving(trace=False),
    }
    whole = plait.train(job, plan, 2, out=tmp_path / "whole", **given)
    saved = load_checkpoint(whole.folder)
    ranks = SerialRanks(
        job, prepare(job, resolve(plan, 2, settings), "cpu", torch.float64, lambda event: None), torch.float64
    )
    losses = []
    for step in range(STEPS):
        assert ranks.run(step)
        losses.append(ranks.outcome.loss)
    assert whole.losses == pytest.approx(losses, rel=1e-12)
    for number, machine in enumerate(ranks.machines):
        for key, tensor in machine.state.parameters.items():
            found = saved.beside[f"worker {number}/parameter/{key}"]
            torch.testing.assert_close(found, tensor.detach(), rtol=1e-12, atol=1e-14)
    for key in saved.parameters:
        own = torch.stack([machine.state.parameters[key].detach() for machine in ranks.machines])
        mean = ranks.machines[1].averaging.center[key] if name == "easgd" else own.mean(0)
        torch.testing.assert_close(saved.parameters[key], mean, rtol=1e-12, atol=1e-14)
        assert not torch.equal(own[0], own[1])
    _check_evaluation(whole)
    if name == "local-sgd":  # after steps 0, 3 and 7: weights and batch statistics
        floats = [t for t in (saved.parameters | saved.buffers).values() if t.is_floating_point()]
        sent = json.loads((whole.folder / "totals.json").read_text())["bytes_sent"]
        assert set(sent.values()) == {3 * sum(t.numel() * t.element_size() for t in floats)}
    folder = tmp_path / "parts"
    plait.train(job, plan, 2, out=folder, **(given | {"steps": 6}))
    rest = plait.resume(folder, 2, job=job, plan=plan, out=folder, **given)
    assert rest.losses == whole.losses[6:]
    again = load_checkpoint(folder)
    assert all(torch.equal(again.beside[key], tensor) for key, tensor in saved.beside.items())
    assert all(torch.equal(again.parameters[key], tensor) for key, tensor in saved.parameters.items())


def _check_evaluation(result: plait.Result) -> None:
    """What was measured last are the weights that were saved."""
    model = jobs.network().double().eval()
    model.load_state_dict(result.weights)
    inputs, targets = (torch.stack(column) for column in zip(*jobs.samples(31, seed=1), strict=True))
    loss = nn.CrossEntropyLoss()(model(inputs.double()), targets)
    assert result.evaluation["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)


def test_verify_compares_processes_with_all_workers_in_one() -> None:
    found = verify(jobs.dropout(), "local-sgd", 2, steps=3, settings={"average": {"every": 2}})
    assert found.ok, found.first
    assert "each of 2 workers train on its own share" in " ".join(found.notices)
    in_turn = {"elastic": {"variant": "round-robin", "tau": 2, "momentum": 0.5}}
    found = verify(jobs.dropout(), "easgd", 3, steps=5, settings=in_turn)
    assert found.ok, found.first
    with pytest.raises(UsageError, match="depends on which of them comes first"):
        verify(jobs.dropout(), "easgd", 3)


def test_a_dead_worker_loses_its_turn(tmp_path: Path) -> None:
    told: list[str] = []
    result = plait.train(
        replace(jobs.killed(), epochs=2),
        "easgd",
        3,
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
        changes=plait.Changes(settings={"elastic": {"variant": "round-robin", "tau": 1}}),
        watching=plait.Watching(listener=lambda event: told.append(event.get("notice", ""))),
    )
    assert any("SIGKILL" in text and "The others go on" in text for text in told)
    assert len(result.losses) == 8
    assert load_checkpoint(result.folder).step == 8


def test_checkpoints_move_between_plans_and_numbers_of_workers(tmp_path: Path) -> None:
    """Everybody starts from what was saved: with a learning rate of 0 nobody changes it."""
    job = replace(jobs.dropout(), schedule=lambda step: 0.02 if step < 3 else 0.0, steps=3, epochs=None)
    job = replace(job, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9))
    folder = tmp_path / "run"
    before = plait.train(job, "ddp", 2, out=folder, saving=plait.Saving(trace=False)).weights
    route = ("local-sgd", 3), ("diloco", 2), ("easgd", 2), ("easgd-in-turn", 3), ("local-sgd", 2), ("ddp", 2)
    for steps, (name, ranks) in enumerate(route, start=4):
        plan, settings = (PLANS | IN_TURN).get(name, (name, {}))
        result = plait.resume(
            folder,
            ranks,
            job=job,
            plan=plan,
            out=folder,
            steps=steps,
            changes=plait.Changes(settings=settings),
            saving=plait.Saving(trace=False),
        )
        assert len(result.losses) == 1
        after = result.weights
        for key, tensor in before.items():
            if "running" not in key and "tracked" not in key:
                torch.testing.assert_close(after[key], tensor, rtol=1e-6, atol=1e-7, msg=f"{name} {key}")


def test_an_interrupted_run_ends_at_one_step_of_all_workers_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = forked.plait(
        "run", jobs.reference("slow"), "--plan", "local-sgd", "--ranks", "2", "--set", "average.every=7",
        "--steps", "80", "--out", folder, "--checkpoint-every", "5",
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(folder.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "interrupted and saved" in err, err
    step = load_checkpoint(folder).step
    assert 5 <= step < 80
    assert jobs.cli("run", "--resume", folder, "--steps", str(step + 3)) == 0
    assert load_checkpoint(folder).step == step + 3
