"""Update rules in real processes: objectives in turn, averaged weights that are evaluated, a rate that follows what was
measured; begun under one plan and gone on with under another, files in between.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.run.test_objectives import Gan, gan
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import plait
from plait.run.checkpoint.store import load_checkpoint

pytestmark = pytest.mark.timeout(240)


def told_apart(model: Gan, batch: list[Tensor]) -> Tensor:
    real, noise, _ = batch
    return (model.critic(real) - model.critic(model.generator(noise))).mean()


def job() -> plait.Job:
    made = gan()
    critic, generator = made.objectives
    falling = replace(generator, schedule=lambda optimizer: ReduceLROnPlateau(optimizer, "max", patience=0))
    return replace(
        made, objectives=[critic, falling], evaluate=made.data, evaluate_every=2, follow="apart",
        metrics={"apart": told_apart},
    )  # fmt: skip


def test_turns_averages_and_measured_rates_go_on_under_another_plan(tmp_path: Path) -> None:
    exact = plait.Trial(dtype="float64")
    one = plait.train(job(), "single", out=tmp_path / "one", trial=exact)
    plait.train(job(), "ddp", 2, steps=4, out=tmp_path / "two", trial=exact)
    two = plait.train(job(), "zero3", 2, resume=tmp_path / "two", out=tmp_path / "two", trial=exact)
    assert two.losses == pytest.approx(one.losses[4:], rel=1e-9)
    assert two.evaluation == pytest.approx(one.evaluation, rel=1e-9)
    wanted, found = load_checkpoint(one.folder), load_checkpoint(two.folder)
    rates = [saved.schedule["generator"]["plateau"]["rates"] for saved in (wanted, found)]
    assert rates[0] == rates[1] and rates[0][0] < 0.05, "it was lowered, and alike"
    assert found.averaged == wanted.averaged == len(one.losses)
    for held, other in ((wanted.parameters, found.parameters), (wanted.average, found.average)):
        assert held.keys() == other.keys()
        for name, tensor in held.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-12)
    model = Gan().double()
    model.load_state_dict(two.averaged)
    model.eval()
    with torch.no_grad():
        measured = told_apart(model, [tensor.double() for tensor in job().data])
    assert float(measured) == pytest.approx(two.evaluation["apart"], rel=1e-9), "the averages are measured"
