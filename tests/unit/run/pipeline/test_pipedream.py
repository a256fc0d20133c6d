"""`pipedream`: every micro-batch is an update of its own, on the weights of its forward; all ranks in this process.

What it computes is compared with PipeDream written out in plain PyTorch, within 1e-9 of a tensor's largest value
(float64, as everywhere); with one micro-batch a step it is what every plan computes, to the bit.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.run.pipeline.pipedream_reference import written_out
from tests.unit.run.pipeline.pipelines import captures, check, reference
from tests.unit.run.training import CASES
from tests.zoo import ZOO
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from plait.errors import PlanError, UsageError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.plan import PIPE
from plait.program.layout import Layout
from plait.program.stage.versions import StageVersions, stage_versions
from plait.run.hold.away.copies import copies_of, spread
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks, run_serially
from plait.run.verify import verify

ROUNDS, BATCH, MICRO_BATCHES = 2, 13, 6
"""Micro-batches of 3 and 2 samples; more than any pipeline here has stages, so that stages are as stale as they get."""


def job_of(name: str, optimizer: str, **changes: Any) -> Job:
    given: dict[str, Any] = {"batch": BATCH, "steps": ROUNDS, "num_samples": ROUNDS * BATCH, "shuffle": False}
    given |= {"optimizer": optimizer, "accumulate": MICRO_BATCHES}
    return {**ZOO, **CASES}[name].job(**(given | changes))


def assert_as_written_out(
    job: Job, name: str, mesh: dict[str, int], settings: dict[str, Any] | None = None
) -> None:
    plan = resolve("pipedream", None, settings, mesh)
    programs = prepare(job, plan, "cpu", torch.float64, lambda event: None, captures(name))
    layout = programs.layout
    assert isinstance(layout, Layout)
    stage_of = {parameter: owners[0] for parameter, owners in layout.owners.items()}
    expected = written_out(
        job, stage_of, mesh[PIPE], ROUNDS, vertical_sync=bool((settings or {}).get("pipe"))
    )
    ranks = SerialRanks(programs.whole, programs, torch.float64)
    losses = [ranks.outcome.loss for step in range(ROUNDS) if ranks.run(step)]
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    for ours, theirs in ((expected.weights, ranks.weights()), (expected.buffers, ranks.buffers())):
        assert set(ours) == set(theirs)
        for tensor_name, tensor in ours.items():
            scale = float(tensor.double().abs().max())
            difference = float((tensor.double() - theirs[tensor_name].double()).abs().max())
            assert difference <= 1e-9 * max(scale, 1e-3), tensor_name
    assert spread(copies_of(machine.state, machine.rank) for machine in ranks.machines) == 0.0


WRITTEN_OUT = ("mlp", "gpt", "lstm", "masked_gpt", "unet", "moe_dense", "small_batch_norm")


@pytest.mark.parametrize(
    ("name", "stages", "optimizer"),
    [
        *((name, 2, ("momentum", "adamw")[turn % 2]) for turn, name in enumerate(WRITTEN_OUT)),
        *((name, 4, ("adamw", "momentum")[turn % 2]) for turn, name in enumerate(WRITTEN_OUT)),
    ],
)
def test_it_computes_what_is_written_out(name: str, stages: int, optimizer: str) -> None:
    """Losses with a weight of the batch's own, views of weights, skip connections and batch statistics among them.

    The optimizers take turns: which weights an op reads does not depend on how they are updated."""
    assert_as_written_out(job_of(name, optimizer), name, {PIPE: stages})


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "gpt", "masked_gpt"])
def test_vertical_sync_computes_what_is_written_out(name: str, stages: int) -> None:
    settings = {"pipe": {"vertical_sync": True}}
    assert_as_written_out(job_of(name, "adamw"), name, {PIPE: stages}, settings)


@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize("name", ["mlp", "masked_gpt"])
def test_a_second_axis_changes_nothing(name: str, axis: str) -> None:
    """Micro-batches of 3 and 2 samples on 2 ranks of data: gradients are summed before each update."""
    assert_as_written_out(job_of(name, "adamw"), name, {PIPE: 2, axis: 2})


def test_recomputed_ops_read_the_weights_of_the_forward() -> None:
    job = job_of("gpt", "adamw")
    assert_as_written_out(job, "gpt", {PIPE: 3}, {"memory": {"recompute": "full"}})


def test_the_comparison_tells_fresh_weights_from_stale_ones() -> None:
    """Otherwise all of the above would prove nothing: one version more or less is far beyond the tolerance."""
    job = job_of("mlp", "momentum")
    stale = written_out(job, dict.fromkeys(dict(job.build_model().named_parameters()), 0), 2, ROUNDS)
    fresh = written_out(job, dict.fromkeys(dict(job.build_model().named_parameters()), 1), 2, ROUNDS)
    assert max(float((stale.weights[n] - fresh.weights[n]).abs().max()) for n in stale.weights) > 1e-5


@pytest.mark.parametrize("name", ["mlp", "gpt_dropout", "masked_gpt", "unet", "resnet_bn"])
def test_one_micro_batch_a_step_is_what_one_process_computes(name: str) -> None:
    """To the bit: nothing is stale, and no sum changes its order."""
    found = check(reference(name, 1), "pipedream", 4)
    assert found.ok, found.first
    assert {entry.largest for entry in found.differences} == {0.0}


def test_verify_says_why_it_cannot_compare_more() -> None:
    with pytest.raises(UsageError) as raised:
        verify(job_of("mlp", "sgd"), "pipedream", 2, serial=True)
    assert "each of the 6 micro-batches" in raised.value.what
    assert "accumulate=1" in (raised.value.fix or "")


def test_staleness_and_stashes_are_told_before_the_run() -> None:
    events: list[dict[str, Any]] = []
    programs = prepare(
        job_of("mlp", "sgd"), resolve("pipedream", 3), "cpu", torch.float64, events.append, captures("mlp")
    )
    (notices,) = [event["notices"] for event in events if "notices" in event]
    text = " ".join(notices)
    assert "each of the 6 micro-batches of a step is an update of its own" in text
    assert "stage 0 up to 2, stage 1 up to 1, stage 2 up to 0" in text
    program = programs.for_sizes([(3,), (2,), (2,), (2,), (2,), (2,)])
    found = stage_versions(program)
    assert [entry.staleness for entry in found] == [2, 1, 0]
    assert all(f"stage {e.stage} {e.stashes} (" in text for e in found)


def test_the_stashes_of_a_long_round_are_bounded_by_the_stages() -> None:
    """p - s versions on stage s, the current one included, of the weights that a backward reads."""
    job = replace(job_of("gpt", "sgd"), batch=26, accumulate=26)
    programs = prepare(
        job, resolve("pipedream", 4), "cpu", torch.float64, lambda event: None, captures("gpt")
    )
    program = programs.for_sizes([(1,)] * 26)
    found = stage_versions(program)
    assert [(entry.staleness, entry.stashes) for entry in found] == [(3, 3), (2, 2), (1, 1), (0, 0)]
    held = [sum(p.numel() * 8 for p in _held(programs, rank)) for rank in range(4)]
    for entry in found[:3]:
        assert 0 < entry.num_bytes <= entry.stashes * held[entry.stage]
    assert found[3] == StageVersions(stage=3, staleness=0, stashes=0, num_bytes=0)


def _held(programs: Any, rank: int) -> list[Tensor]:
    model = dict(programs.job.build_model().named_parameters())
    return [model[name] for name, owners in programs.layout.owners.items() if rank in owners]


def test_learning_rates_change_once_a_round() -> None:
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.1 / (step + 1)

    run_serially(job_of("mlp", "sgd", schedule=rate), resolve("pipedream", 2), ROUNDS, torch.float64)
    assert sorted(set(asked)) == list(range(ROUNDS))


# --- what is refused before anything runs -------------------------------------------------------------------


class LateWeight(nn.Module):
    """Its loss is divided by something that the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x).relu())
        return output


def late(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    output = model(batch[0])
    return output.square().sum(), output.detach().abs().sum()


REFUSED: tuple[tuple[str, dict[str, Any], dict[str, int], dict[str, Any], tuple[str, str]], ...] = (
    ("mlp", {"clip_norm": 0.5}, {PIPE: 2}, {}, ("clip_norm=0.5 needs the gradients of all stages", "drop clip_norm")),
    ("gpt_tied", {}, {PIPE: 2}, {}, ("tokens.weight is used by the stages [0, 1]", "plan 1f1b")),
    ("mlp", {}, {PIPE: 2, "data": 2}, {"memory": {"zero": 1}}, ("memory.zero=1", "memory.zero=0")),
    ("mlp", {}, {PIPE: 2}, {"pipe": {"per_rank": 2}}, ("one stage a rank; pipe.per_rank is 2", "pipe.per_rank=1")),
    ("mlp", {}, {PIPE: 1}, {}, ("needs stages; the mesh has pipe=1", "2 or more ranks on pipe")),
    (
        "mlp",
        {"model": LateWeight, "loss": None, "objective": late},
        {PIPE: 2},
        {},
        ("known only after the last stage", "follows from the batch"),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "mesh", "settings", "says"), REFUSED)
def test_what_needs_all_stages_at_once_is_refused(
    name: str, changes: dict[str, Any], mesh: dict[str, int], settings: dict[str, Any], says: tuple[str, str]
) -> None:
    plan = resolve("pipedream", None, settings, mesh)
    with pytest.raises(PlanError) as raised:
        prepare(job_of(name, "sgd", **changes), plan, "cpu", torch.float64, lambda event: None)
    assert says[0] in raised.value.what
    assert says[1] in (raised.value.fix or "")


def test_what_one_rank_alone_would_cut_is_not_refused() -> None:
    plan = resolve("pipedream", None, {"memory": {"zero": 1}}, {PIPE: 2})
    prepare(job_of("mlp", "sgd"), plan, "cpu", torch.float64, lambda event: None)


def test_vertical_sync_is_refused_where_it_says_nothing() -> None:
    with pytest.raises(PlanError, match="vertical_sync says nothing about schedule 1f1b"):
        resolve("1f1b", 2, {"pipe": {"vertical_sync": True}})


# --- it trains ----------------------------------------------------------------------------------------------

DIGITS = Path(__file__).parents[4] / "examples" / "data" / "digits.npz"


def digits(*, held_out: bool = False) -> TensorDataset:
    """1,797 handwritten digits, of which every fifth is held out."""
    with np.load(DIGITS) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    chosen = (torch.arange(len(labels)) % 5 == 4) == held_out
    return TensorDataset(images[chosen].flatten(1) / 16, labels[chosen].long())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy_after(plan: str, micro_batches: int, batch: int) -> float:
    """Of 12 epochs, at whose end the rate is near 0: what is compared has come to rest."""
    steps = 12 * -(-1438 // batch)
    job = Job(
        model=network,
        data=digits(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.8),
        schedule=lambda step: 0.05 * (1 - step / steps),
        batch=batch,
        accumulate=micro_batches,
        steps=steps,
    )
    programs = prepare(job, resolve(plan, 3), "cpu", torch.float32, lambda event: None)
    ranks = SerialRanks(job, programs, torch.float32)
    for step in range(steps):
        assert ranks.run(step)
    model = network()
    model.load_state_dict(ranks.weights())
    images, labels = digits(held_out=True).tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def test_it_reads_digits_as_well_as_synchronous_1f1b() -> None:
    """As many updates of as many samples each, of which stages see up to 2 too late: within 1 point of accuracy."""
    synchronous = accuracy_after("1f1b", 1, 32)
    asynchronous = accuracy_after("pipedream", 9, 9 * 32)
    assert synchronous > 0.94
    assert abs(asynchronous - synchronous) <= 0.01
