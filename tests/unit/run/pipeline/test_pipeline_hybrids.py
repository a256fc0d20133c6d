"""Pipelines beside the other axes, up to 16 ranks in this process, with the norm of the gradients clipped.

Sums over ranks of `data` and `tensor`, and the norm's over all ranks, change their order: DESIGN's tolerance for
float64, 1e-9 of a tensor's largest value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.run.pipeline.pipelines import SCHEDULES, assert_equal, check, in_turn, reference
from torch import Tensor

from plait.errors import PlanError
from plait.plan.named import resolve
from plait.program.instructions import Accumulate, Collective
from plait.program.value import Value
from plait.run.interpret import serial
from plait.run.interpret.serial import add_up
from plait.run.prepare.prepare import prepare
from plait.run.proof.reference import Reference
from plait.run.proof.serial_run import SerialRanks
from plait.run.verify import verify

CLIP = 0.05
"""Below the norm of every step here: the clipped gradients carry it."""
ZERO1 = {"memory": {"zero": 1}}
EIGHT: Mapping[str, Mapping[str, int]] = {
    "gpt_dropout": {"pipe": 2, "data": 2, "tensor": 2},
    "masked_gpt": {"pipe": 4, "data": 2},
    "gpt_tied": {"pipe": 2, "tensor": 4},
}
SIXTEEN: Mapping[str, Mapping[str, int]] = {
    "mlp": {"pipe": 4, "data": 2, "tensor": 2},
    "lstm": {"pipe": 4, "data": 4},
}


def known_of(name: str) -> Reference:
    return reference(name, 4, CLIP, 13)


def assert_clipped_alike(known: Reference, plan: str, mesh: Mapping[str, int], settings: Any = None) -> None:
    found = check(known, plan, mesh=mesh, settings=settings)
    assert_equal(found)
    assert "norm" in {entry.kind for entry in found.differences}


@pytest.mark.parametrize(("name", "schedule"), in_turn([*EIGHT], SCHEDULES, 4))
def test_eight_ranks(name: str, schedule: str) -> None:
    assert_clipped_alike(known_of(name), schedule, EIGHT[name])


@pytest.mark.parametrize(("name", "schedule"), in_turn([*SIXTEEN], SCHEDULES, 3))
def test_sixteen_ranks(name: str, schedule: str) -> None:
    assert_clipped_alike(known_of(name), schedule, SIXTEEN[name])


@pytest.mark.parametrize(("name", "schedule"), in_turn(["mlp", "gpt_tied"], SCHEDULES, 3))
def test_with_the_optimizer_state_cut(name: str, schedule: str) -> None:
    """zero1: what a rank of `data` updates is a part of its stages' parameters alone."""
    settings = ZERO1 | {"sync": {"bucket_mib": 0.01}}
    assert_clipped_alike(known_of(name), schedule, {"pipe": 2, "data": 2}, settings)


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_cut_over_data_are_refused(zero: int) -> None:
    with pytest.raises(PlanError, match=f"memory.zero={zero} with pipe=2") as caught:
        check(known_of("mlp"), "1f1b", mesh={"pipe": 2, "data": 2}, settings={"memory": {"zero": zero}})
    assert caught.value.fix == "set memory.zero=1, or 0."


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble-2"])
def test_the_norm_is_the_same_on_all_ranks_and_that_of_one_process(schedule: str) -> None:
    """Every stage has other gradients: a rank that clipped by its own norm would tear the model apart."""
    known = known_of("gpt_tied")
    plan = resolve(schedule, None, None, {"pipe": 2, "data": 2, "tensor": 2})
    programs = prepare(known.job, plan, "cpu", known.dtype, lambda event: None, known.captures)
    ranks = SerialRanks(known.job, programs, known.dtype)
    for step in range(known.steps):
        assert ranks.run(step)
        norms = [float(m.outcome.norm) for m in ranks.machines if m.outcome and m.outcome.norm is not None]
        assert len(norms) == 8
        assert len(set(norms)) == 1
        assert norms[0] > CLIP
        assert known.record.norms is not None
        assert norms[0] == pytest.approx(known.record.norms[step], rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_weights_that_are_reduced_after_their_last_gradient(schedule: str) -> None:
    """Where gradients of weights come apart from those of activations, a reduction that starts with the last backward,
    as DDP's does, misses what comes later: silently, with torch's own zero-bubble. Here all is in before it starts."""
    known = known_of("mlp")
    plan = resolve(schedule, None, None, {"pipe": 2, "data": 2})
    program = prepare(known.job, plan, "cpu", known.dtype, lambda event: None, known.captures).for_sizes(
        [(2, 2), (2, 1), (2, 1), (2, 1)]
    )
    for entry in program.classes:
        filled = {Value.bucket(i.bucket): i.id for i in entry.instructions if isinstance(i, Accumulate)}
        sums = [i for i in entry.instructions if isinstance(i, Collective) and i.reads[0] in filled]
        assert {i.axis for i in sums} == {"data", "pipe+data"}  # gradients; the loss
        for instruction in sums:
            assert instruction.id > filled[instruction.reads[0]]
    assert_clipped_alike(known, schedule, {"pipe": 2, "data": 2})


def forgets_the_last(tensors: Sequence[Tensor]) -> Tensor:
    """A sum without the last rank's part, of what is large enough to be no scalar."""
    return add_up(tensors[:-1]) if tensors[0].numel() > 8 else add_up(tensors)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_part_that_is_missing_from_the_sum_is_seen(schedule: str) -> None:
    known = replace(known_of("mlp"), steps=1)
    known = replace(
        known,
        record=replace(
            known.record,
            losses=known.record.losses[:1],
            gradients=known.record.gradients[:1],
            norms=(known.record.norms or ())[:1],
        ),
    )
    found = verify(
        known.job, schedule, mesh={"pipe": 2, "data": 2}, serial=True, against=known, reduce=forgets_the_last
    )
    assert "gradient" in {entry.kind for entry in found.differences if not entry.ok}


def test_a_message_that_is_changed_on_its_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient between stages, of one micro-batch, by a millionth."""
    exact = serial.SerialLinks.send

    def flip(links: serial.SerialLinks, send: Any, flat: Tensor) -> Any:
        if send.message == "backward 1>0 micro-batch 2":
            flat = (flat.view(torch.float64) * (1 + 1e-6)).view(torch.uint8)
        return exact(links, send, flat)

    known = reference("mlp", 4)
    monkeypatch.setattr(serial.SerialLinks, "send", flip)
    found = check(known, "1f1b", 2)
    assert not found.ok
    assert found.first is not None and found.first.kind == "gradient"
