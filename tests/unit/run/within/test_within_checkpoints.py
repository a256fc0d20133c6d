"""Checkpoints cross plans and numbers of ranks: saved under one, loaded under another, training goes on as if one
process had never been interrupted, optimizer state included. All ranks in this process; real files and processes are
in `tests/ranks/plans/test_within.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from threading import Barrier
from typing import Any

import pytest
import torch
from tests.unit.run.within.within import SMALL_BUCKETS, reference
from tests.zoo import OPTIMIZERS
from torch import Tensor

from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.checkpoint.state import TrainingState
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.proof.serial_run import SerialRanks

MESHES: dict[str, dict[str, int]] = {
    "single": {},
    "ddp": {"data": 2},
    "zero1": {"data": 3},
    "zero2": {"data": 2},
    "zero3": {"data": 4},
    "megatron": {"tensor": 2},
    "domain": {"domain": 2},
    "zero3 x tensor": {"data": 2, "tensor": 2},
    "zero3 on 3": {"data": 3},
}
"""Plans (first word) on meshes of different sizes."""
SAVED, STEPS = 2, 4
"""The first loss after the checkpoint shows the weights, the second one the optimizer's state."""
KINDS = {"adamw": "exp_avg_sq", "momentum": "momentum_buffer", "adagrad": "sum"}
"""Optimizers, and a tensor of their state; Adagrad's is there before the first step."""
CASE = "gpt_tied"


def job_of(optimizer: str) -> Job:
    return replace(reference(CASE, 1, STEPS).job, optimizer=OPTIMIZERS[optimizer])


@cache
def programs_of(plan: str) -> Programs:
    """Whatever the optimizer is, the programs are the same."""
    known = reference(CASE, 1, STEPS)
    chosen = resolve(plan.split()[0], None, {"sync": SMALL_BUCKETS}, MESHES[plan])
    return prepare(known.job, chosen, "cpu", known.dtype, lambda event: None, known.captures)


def ranks_of(plan: str, optimizer: str) -> SerialRanks:
    return SerialRanks(job_of(optimizer), programs_of(plan), torch.float64)


def train(ranks: SerialRanks, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        assert ranks.run(step)
        losses.append(ranks.outcome.loss)
    return losses


class Meeting:
    """One rank's way to meet the others, each of which runs in a thread of its own."""

    def __init__(self, rank: int, brought: list[Any], barrier: Barrier) -> None:
        self._rank, self._brought, self._barrier = rank, brought, barrier

    def __call__(self, name: str, shard: Tensor) -> list[Tensor]:
        return [tensor for _, tensor in self.tell((name, shard.clone()))]  # as a message: the sender goes on

    def tell(self, value: Any) -> list[Any]:
        self._brought[self._rank] = value
        self._barrier.wait(timeout=20)
        found = list(self._brought)
        self._barrier.wait(timeout=20)
        return found


def collect(ranks: SerialRanks) -> TrainingState:
    """Rank 0's checkpoint; all ranks take part."""
    count = len(ranks.machines)
    brought: list[Any] = [None] * count
    barrier = Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        states = list(
            pool.map(
                lambda machine: machine.state.to_checkpoint({}, Meeting(machine.rank, brought, barrier)),
                ranks.machines,
            )
        )
    return states[0]


@cache
def uninterrupted(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    ranks = ranks_of("single", optimizer)
    return train(ranks, 0, STEPS), {name: tensor.clone() for name, tensor in ranks.weights().items()}


@cache
def saved(plan: str, optimizer: str) -> TrainingState:
    ranks = ranks_of(plan, optimizer)
    assert train(ranks, 0, SAVED) == pytest.approx(uninterrupted(optimizer)[0][:SAVED], rel=1e-9)
    return collect(ranks)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Within 1e-8 of each tensor's largest value: keys have a bias whose gradient is noise, which Adagrad enlarges."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert float((found[name] - tensor).abs().max()) <= 1e-8 * float(tensor.abs().max()), name


RING = list(pairwise([*MESHES, next(iter(MESHES))]))


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        *((before, after, "adamw") for before, after in permutations(MESHES, 2)),
        *((before, after, kind) for before, after in RING for kind in ("momentum", "adagrad")),
    ],
)
def test_training_goes_on_under_another_plan(before: str, after: str, optimizer: str) -> None:
    """Every pair with AdamW; with the others round in a ring, since a checkpoint does not show who wrote it."""
    losses, weights = uninterrupted(optimizer)
    ranks = ranks_of(after, optimizer)
    for machine in ranks.machines:
        machine.state.load(saved(before, optimizer))
        assert machine.state.steps_done == SAVED
    assert train(ranks, SAVED, STEPS) == pytest.approx(losses[SAVED:], rel=1e-9)
    assert_close(ranks.weights(), weights)


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("plan", [plan for plan in MESHES if plan != "single"])
def test_a_checkpoint_does_not_show_which_plan_wrote_it(plan: str, optimizer: str) -> None:
    """Whole tensors under the user's names: parameters and the optimizer's state, shapes and options too."""
    found, wanted = saved(plan, optimizer), saved("single", optimizer)
    assert (found.aliases, found.step, found.optimizer.groups) == (
        wanted.aliases,
        wanted.step,
        wanted.optimizer.groups,
    )
    assert found.aliases, "the case has tied weights"
    assert_close(found.parameters, wanted.parameters)
    assert found.optimizer.tensors.keys() == wanted.optimizer.tensors.keys()
    for name, entries in wanted.optimizer.tensors.items():
        assert KINDS[optimizer] in entries
        assert_close(found.optimizer.tensors[name], entries)


@pytest.mark.parametrize("plan", MESHES)
def test_what_is_loaded_is_what_is_saved_again(plan: str) -> None:
    """Bit for bit, without a step in between."""
    state = saved("zero3 x tensor", "adamw")
    ranks = ranks_of(plan, "adamw")
    for machine in ranks.machines:
        machine.state.load(state)
    again = collect(ranks)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [(again.parameters, state.parameters)]
    pairs += [(again.optimizer.tensors[name], entries) for name, entries in state.optimizer.tensors.items()]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_optimizer_state_matters() -> None:
    """Without it the second loss differs: the tests above would see that it was lost."""
    losses, _ = uninterrupted("adamw")
    ranks = ranks_of("zero3", "adamw")
    state = saved("single", "adamw")
    for machine in ranks.machines:
        machine.state.load(replace(state, optimizer=replace(state.optimizer, tensors={}, values={})))
    first, second = train(ranks, SAVED, STEPS)
    assert first == pytest.approx(losses[SAVED], rel=1e-9)
    assert second != pytest.approx(losses[SAVED + 1], rel=1e-6)
