"""Checkpoints move between pipelines and all other plans, with other numbers of ranks and other cuts: training goes on
as if one process had never been interrupted. All ranks in this process; real files are in `tests/ranks`."""

from functools import cache
from typing import Any

import pytest
from tests.unit.run.pipeline.pipelines import reference
from tests.unit.run.within.test_within_checkpoints import collect, train

from plait.plan.named import resolve
from plait.run.checkpoint.state import TrainingState
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks

PLANS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "single": ("single", {}, {}),
    "ddp": ("ddp", {"data": 3}, {}),
    "zero3": ("zero3", {"data": 2}, {}),
    "1f1b": ("1f1b", {"pipe": 2}, {}),
    "another cut": ("1f1b", {"pipe": 2}, {"pipe": {"cut": ["blocks.0.mlp"]}}),
    "zero-bubble": ("zero-bubble", {"pipe": 3}, {}),
    "zero1 x pipe": ("gpipe", {"pipe": 2, "data": 2}, {"memory": {"zero": 1}}),
}
PIPELINES = tuple(name for name, (_, mesh, _) in PLANS.items() if "pipe" in mesh)


@cache
def ranks_of(plan: str) -> SerialRanks:
    known = reference("gpt_tied", 4, 0.5, 7)
    name, mesh, settings = PLANS[plan]
    chosen = resolve(name, None, settings, mesh)
    programs = prepare(known.job, chosen, "cpu", known.dtype, lambda event: None, known.captures)
    return SerialRanks(known.job, programs, known.dtype)


@cache
def saved(plan: str) -> TrainingState:
    """After one step."""
    ranks = ranks_of(plan)
    assert train(ranks, 0, 1) == pytest.approx(reference("gpt_tied", 4, 0.5, 7).record.losses[:1], rel=1e-9)
    return collect(ranks)


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a in PLANS for b in PLANS if a != b and (a in PIPELINES or b in PIPELINES)],
)
def test_training_goes_on_under_another_plan(before: str, after: str) -> None:
    known = reference("gpt_tied", 4, 0.5, 7)
    saved(after)  # whatever it has learned is replaced
    state = saved(before)
    ranks = ranks_of(after)
    for machine in ranks.machines:
        machine.state.load(state)
    assert train(ranks, 1, 2) == pytest.approx(known.record.losses[1:], rel=1e-9)
    weights = ranks.weights()
    for name, wanted in known.record.weights.items():
        assert float((weights[name] - wanted).abs().max()) <= 1e-8 * float(wanted.abs().max()), name
