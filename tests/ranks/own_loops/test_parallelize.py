"""`plait.parallelize` in loops of the user's own: under torchrun, with unequal and empty shares, and in one process."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.ranks import jobs
from torch import nn

import plait
from plait.errors import PlanError, UsageError
from plait.run.checkpoint.store import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).parents[3]

# Who has how many of the ten samples in each step: unequal, and nothing at all, last or first.
SHARES = ((7, 3), (10, 0), (0, 10))

LOOP = """
import json, os, sys
import torch
import plait
from tests.ranks import jobs
from plait.errors import PlanError
from tests.ranks.own_loops.test_parallelize import SHARES, half, layerwise_job, loop_job

rank = int(os.environ["RANK"])
step = plait.parallelize(loop_job(), "ddp")
samples = jobs.samples(30)
losses = []
for number, sizes in enumerate(SHARES):
    first = 10 * number + sum(sizes[:rank])
    mine = samples[first : first + sizes[rank]]
    share = tuple(torch.stack(column) for column in zip(*mine)) if mine else None
    losses.append(step(share))
weights = {name: tensor.tolist() for name, tensor in step.model.state_dict().items()}
local = plait.parallelize(loop_job(), "local-sgd", settings={"average": {"every": 2}})
apart = []
for number, sizes in enumerate(SHARES):
    mine = samples[10 * number + sum(sizes[:rank]) : 10 * number + sum(sizes[: rank + 1])]
    apart.append(local(tuple(torch.stack(column) for column in zip(*mine)) if mine else None))
    held = {name: tensor.tolist() for name, tensor in local.model.named_parameters()}
    if number == 1:
        averaged = held
whole = plait.parallelize(layerwise_job(), "zero1")
by_layer = [whole(half(number, rank)) for number in range(len(SHARES))]
try:
    plait.parallelize(layerwise_job(), "megatron")
    refused = ""
except PlanError as error:
    refused = str(error)
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump({"losses": losses, "weights": weights, "apart": apart, "averaged": averaged, "last": held,
               "by_layer": by_layer, "refused": refused}, file)
"""


def loop_job() -> plait.Job:
    """Clipping, dropout and batch norm: all of them must see the whole batch."""
    return replace(
        jobs.dropout(), data=jobs.samples(30), batch=10, evaluate=None, metrics=None, shuffle=False, epochs=1
    )


def layerwise_job() -> plait.Job:
    """How far a tensor moves depends on all of it."""
    return replace(loop_job(), optimizer=jobs.Layerwise, schedule=None)


def half(number: int, rank: int) -> tuple[torch.Tensor, ...]:
    """What one of two ranks has of a step."""
    mine = jobs.samples(30)[10 * number + 5 * rank : 10 * number + 5 * rank + 5]
    return tuple(torch.stack(column) for column in zip(*mine, strict=True))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, object]]:
    """What two processes of torchrun computed."""
    folder = tmp_path_factory.mktemp("loop")
    script = folder / "loop.py"
    script.write_text(LOOP)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, folder],
        capture_output=True, text=True, timeout=80, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)}


def test_workers_that_average_now_and_then_may_be_called_too(told: dict[int, dict[str, object]]) -> None:
    """Averaged after the second step, whoever had samples of it; the third is rank 1's alone."""
    assert told[0]["averaged"] == told[1]["averaged"] == told[0]["last"] != told[1]["last"]
    first, second = told[0]["apart"], told[1]["apart"]
    assert isinstance(first, list) and isinstance(second, list)
    assert [loss == loss for loss in first] == [True, True, False]  # NaN is no loss
    assert [loss == loss for loss in second] == [True, False, True]


def test_an_optimizer_of_whole_tensors_has_them_or_is_refused(told: dict[int, dict[str, object]]) -> None:
    """zero1 gives each tensor to one rank; megatron cuts within tensors."""
    losses, _ = alone(layerwise_job())
    assert told[0]["by_layer"] == told[1]["by_layer"] == pytest.approx(losses, rel=1e-5)
    for rank in (0, 1):
        assert "Layerwise cannot update parts" in str(told[rank]["refused"])


def alone(job: plait.Job | None = None) -> tuple[list[float], plait.Step]:
    step = plait.parallelize(loop_job() if job is None else job, "single")
    losses = []
    for number in range(len(SHARES)):
        batch = jobs.samples(30)[10 * number : 10 * number + 10]
        losses.append(step(tuple(torch.stack(column) for column in zip(*batch, strict=True))))
    return losses, step


def test_unequal_and_empty_shares_give_the_loss_of_the_whole_batch(
    told: dict[int, dict[str, object]],
) -> None:
    losses, step = alone()
    assert told[0]["losses"] == told[1]["losses"] == pytest.approx(losses, rel=1e-5)
    assert told[0]["weights"] == told[1]["weights"]
    weights = told[0]["weights"]
    assert isinstance(weights, dict)
    for name, tensor in step.model.state_dict().items():
        torch.testing.assert_close(
            torch.tensor(weights[name], dtype=tensor.dtype), tensor, rtol=1e-4, atol=1e-5
        )


def test_a_loop_of_ones_own_equals_train(tmp_path: Path) -> None:
    losses, step = alone()
    result = plait.train(loop_job(), "single", out=tmp_path / "run")
    assert result.losses == tuple(losses)
    assert all(torch.equal(result.weights[name], tensor) for name, tensor in step.model.state_dict().items())


def test_a_checkpoint_of_ones_own_loop(tmp_path: Path) -> None:
    _, step = alone()
    save_checkpoint(tmp_path, step.checkpoint())
    saved = load_checkpoint(tmp_path)
    assert saved.step == len(SHARES)
    assert all(torch.equal(saved.parameters[name], p) for name, p in step.model.named_parameters())


def test_accumulation_splits_the_share() -> None:
    whole = plait.parallelize(jobs.plain(), "single")
    parts = plait.parallelize(replace(jobs.plain(), accumulate=3), "single")
    batch = tuple(torch.stack(column) for column in zip(*jobs.samples(8), strict=True))
    assert parts(batch) == pytest.approx(whole(batch), rel=1e-6)
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=1e-5, atol=1e-6)


def test_an_uncapturable_model_can_be_stepped() -> None:
    step = plait.parallelize(replace(jobs.plain(), model=jobs.FailsOnMark), "single")
    plain = plait.parallelize(
        replace(jobs.plain(), model=lambda: nn.Sequential(jobs.FailsOnMark().inner)), "single"
    )
    batch = tuple(torch.stack(column) for column in zip(*jobs.samples(8), strict=True))
    assert step(batch) == pytest.approx(plain(batch), rel=1e-6)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(PlanError, match="for 2 ranks, but 1 processes were started"):
        plait.parallelize(jobs.plain(), plait.resolve("ddp", 2))
    step = plait.parallelize(jobs.plain(), "single")
    with pytest.raises(UsageError, match="no step has been made"):
        _ = step.outcome
    with pytest.raises(UsageError, match="empty"):
        step(None)
    with pytest.raises(PlanError, match="does not fit"):  # all that is checked before a run is checked here
        plait.parallelize(jobs.plain(), "single", memory="1KiB")
