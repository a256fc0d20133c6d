"""Update rules in real processes: objectives in turn, averaged weights that are evaluated, a rate that follows what was
measured; begun under one plan and gone on with under another, files in between.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.run.test_objectives import Gan, gan
from tests.unit.run.test_updates import averaged
from tests.unit.run.updates import BATCH, STEPS, data, fresh, job_of
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, update_bn

import plait
from plait.callbacks import Watching
from plait.job.updates.average import Average
from plait.plan.named import resolve
from plait.run.checkpoint.store import load_checkpoint
from plait.run.train import train

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
    two = plait.resume(tmp_path / "two", 2, job=job(), plan="zero3", out=tmp_path / "two", trial=exact)
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


def normed() -> plait.Job:
    """Averages in whose network batch norm sees the micro-batches of three steps."""
    rule = Average(kind="swa", start=1, every=2, update_bn=3)
    fields = averaged("swa") | {"average": rule, "accumulate": 2}
    held_out = data()
    return job_of(**fields, evaluate=held_out, evaluate_every=STEPS)


def test_batch_norm_sees_averaged_weights_as_by_torchs_own_pass(tmp_path: Path) -> None:
    exact = plait.Trial(dtype="float64")
    said: list[str] = []
    tell = lambda event: said.extend(event.get("notices", ()))  # noqa: E731
    one = train(
        normed(), resolve("single", 1), out=tmp_path / "one", trial=exact, watching=Watching(listener=tell)
    )
    two = plait.train(normed(), "ddp", 2, steps=4, out=tmp_path / "two", trial=exact)
    two = plait.resume(tmp_path / "two", 2, job=normed(), plan="zero3", out=tmp_path / "two", trial=exact)
    assert any("batch norm sees the batches of 3 steps" in line for line in said), said
    model, batch = fresh(normed())
    wanted = AveragedModel(model)
    wanted.module.load_state_dict(one.averaged)
    halves = [half for step in range(3) for half in batch(step)[0].split(BATCH // 2)]
    update_bn(halves, wanted)
    statistics = wanted.module.state_dict()
    assert int(statistics["encoder.1.num_batches_tracked"]) == 6
    for result in (one, two):
        for name, tensor in result.averaged.items():
            torch.testing.assert_close(tensor, statistics[name], rtol=1e-9, atol=1e-12)
    assert not torch.equal(one.weights["encoder.1.running_mean"], statistics["encoder.1.running_mean"])
    x, y = (t.double() if t.is_floating_point() else t for t in data())
    with torch.no_grad():
        loss = float(cross_entropy(wanted.module.eval()(x), y))
    assert [one.evaluation["loss"], two.evaluation["loss"]] == pytest.approx([loss, loss], rel=1e-9)


def test_update_bn_where_nobody_runs_the_averages() -> None:
    with pytest.raises(plait.errors.PlanError, match="servers hold the averages"):
        plait.verify(normed(), "server-sync", 3, serial=True)
    with pytest.raises(plait.errors.JobError, match="choose one of the two"):
        Average(kind="swa", buffers=True, update_bn=2)
