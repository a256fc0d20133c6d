"""Hogwild without processes: one worker is one process, workers in turn are small steps; sparse gradients; refusals."""

import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tests.ranks import jobs
from torch import Tensor, nn

import plait
from plait.errors import PlanError, UsageError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.checkpoint.store import load_checkpoint
from plait.run.loop.shared_model import SharedModel, check_shared
from plait.run.loop.task import Task
from plait.run.proof.serial_run import run_serially
from plait.run.verify import verify

VOCAB, LENGTH = 40, 6


class Bag(nn.Module):
    """Logistic regression on bags of words, and an embedding beside it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, 3, mode="sum", sparse=sparse)
        self.embed = nn.Embedding(VOCAB, 3, sparse=sparse)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.bag(ids) + self.embed(ids[:, 0]))
        return output


def words(sparse: bool, optimizer: Any = None, **fields: Any) -> Job:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (48, LENGTH), generator=generator)
    ids[:, 1] = ids[:, 2]  # a row that gets two entries
    given: dict[str, Any] = {
        "model": lambda: Bag(sparse),
        "data": list(zip(ids, ids[:, 0] % 2, strict=True)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.5)),
        "batch": 8,
        "steps": 5,
    }
    return Job(**given | fields)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"accumulate": 2, "clip_norm": 0.05}], ids=["plain", "clipped"])
def test_sparse_gradients_equal_dense_ones(ranks: int, fields: dict[str, Any]) -> None:
    plan = resolve("ddp" if ranks > 1 else "single", ranks)
    sparse, dense = (run_serially(words(kind, **fields), plan, 5, torch.float64) for kind in (True, False))
    assert any("sparse" in notice for notice in sparse.notices)
    assert sparse.losses == pytest.approx(dense.losses, rel=1e-12)
    for name, tensor in dense.weights.items():
        torch.testing.assert_close(sparse.weights[name], tensor, rtol=1e-11, atol=1e-13)


def test_an_update_keeps_sparse_gradients_sparse(tmp_path: Path) -> None:
    kinds: set[bool] = set()

    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            tables = [p for group in self.param_groups for p in group["params"] if len(p) == VOCAB]
            kinds.update(table.grad.is_sparse for table in tables)
            return super().step(closure)

    plait.train(
        words(True, lambda p: Looks(p, lr=0.1)),
        "hogwild",
        1,
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
    )
    assert kinds == {True}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["dropout", "sparse"])
def test_one_worker_equals_one_process(tmp_path: Path, name: str, shared: bool) -> None:
    job = jobs.dropout() if name == "dropout" else replace(words(True), steps=None, epochs=2)
    one = plait.train(job, "single", 1, out=tmp_path / "one", saving=plait.Saving(trace=False))
    wild = plait.train(
        job,
        "hogwild",
        1,
        out=tmp_path / "wild",
        saving=plait.Saving(trace=False),
        changes=plait.Changes(settings={"hogwild": {"shared_state": shared}}),
    )
    assert wild.losses == pytest.approx(one.losses, rel=1e-6)  # the parent divides in float64
    assert wild.evaluation == one.evaluation
    for key, tensor in one.weights.items():
        assert torch.equal(tensor, wild.weights[key]), key
    before, after = (load_checkpoint(tmp_path / run).optimizer.tensors for run in ("one", "wild"))
    assert {n: sorted(entries) for n, entries in before.items()} == {n: sorted(e) for n, e in after.items()}
    for key, entries in before.items():
        assert all(torch.equal(value, after[key][kind]) for kind, value in entries.items())


def test_workers_in_turn_are_small_steps() -> None:
    """Ticket n is the n-th slice of the same order: two workers that take turns are one with half the batch."""
    half = run_serially(replace(words(False), batch=4), resolve("single", 1), 10, torch.float64)
    turns = run_serially(words(False), resolve("hogwild", 2), 5, torch.float64)
    for name, tensor in half.weights.items():
        torch.testing.assert_close(turns.weights[name], tensor, rtol=1e-12, atol=1e-14)
    assert turns.spread == 0.0
    shared = resolve("hogwild", 2, {"hogwild": {"shared_state": True}})
    job = words(False, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    half = run_serially(replace(job, batch=4), resolve("single", 1), 10, torch.float64)
    turns = run_serially(job, shared, 5, torch.float64)
    for name, tensor in half.weights.items():
        torch.testing.assert_close(turns.weights[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shared", [False, True])
def test_a_fresh_interpreter_sees_the_same_memory(tmp_path: Path, shared: bool) -> None:
    plan = resolve("hogwild", 2, {"hogwild": {"shared_state": shared}})
    given = SharedModel(Task(job=jobs.dropout(), plan=plan, folder=tmp_path))
    other = cloudpickle.loads(cloudpickle.dumps(given))
    ours, theirs = given.adopt(1), other.adopt(1)
    for name, parameter in theirs.parameters.items():
        parameter.data.fill_(3.0)
        theirs.optimizer.state[parameter]["exp_avg"].fill_(5.0)
        assert float(ours.parameters[name].detach().mean()) == 3.0
        assert float(ours.optimizer.state[ours.parameters[name]]["exp_avg"].mean()) == 5.0
    for name, buffer in theirs.buffers.items():
        buffer.fill_(7)
        assert float(ours.buffers[name].double().mean()) == 7.0
    first = given.adopt(0)
    seen = {float(first.optimizer.state[p]["exp_avg"].mean()) for p in first.parameters.values()}
    assert seen == {5.0 if shared else 0.0}


def test_verify() -> None:
    outcome = verify(words(True), "hogwild", 1, steps=2)
    assert outcome.ok, outcome.first
    with pytest.raises(UsageError, match="depends on which of them comes first"):
        verify(words(True), "hogwild", 2)


@pytest.mark.parametrize(
    ("optimizer", "shared", "alone"), [("SGD", True, False), ("Adam", True, True), ("Adam", False, False)]
)
def test_updates_that_divide_by_shared_state_take_turns(
    tmp_path: Path, optimizer: str, shared: bool, alone: bool
) -> None:
    """Another's moment over one's own variance, which is zero at first, was a step of 1e7 times the rate."""
    plan = resolve("hogwild", 2, {"hogwild": {"shared_state": shared}})
    job = words(False, lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=0.1))
    model = SharedModel(Task(job=job, plan=plan, folder=tmp_path))
    state, seen = model.adopt(0), []

    def another_waits() -> bool:
        if (child := os.fork()) == 0:
            try:
                fcntl.lockf(model._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

    state.optimizer.register_step_pre_hook(lambda *_: seen.append(another_waits()))
    for parameter in state.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    state.update(0)
    assert seen == [alone]
    assert not another_waits(), "nothing is held after an update"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write to it from cuda"):
        check_shared(resolve("hogwild", 2), "cuda")
    plan = resolve("hogwild", 2, {"hogwild": {"shared_state": True}})
    job = words(False, lambda parameters: torch.optim.NAdam(parameters, lr=0.1))
    with pytest.raises(PlanError, match="state of NAdam"):
        SharedModel(Task(job=job, plan=plan, folder=tmp_path))
    for bad in ({"mesh": {"data": 2, "tensor": 2}}, {"settings": {"sync": {"servers": 1}}}):
        with pytest.raises(PlanError):
            resolve("hogwild", None, **bad)
