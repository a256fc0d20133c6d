"""Parity, the backbone: every plan computes what one process computes, and one process what a plain eager loop does.

In float64, within 1e-9 of each tensor's largest value or 1e-12 of the global norm: sums over ranks are taken in
another order than sums over samples, and nothing else may differ. Shares are never equal here: steps
have 7, 7 and 5 samples, those of large graphs 7 each.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tests.unit.run.training import (
    BATCH,
    CASES,
    NUM_SAMPLES,
    STEPS,
    Trained,
    captures,
    case_job,
    compare,
    train,
    train_eagerly,
    train_job,
)
from tests.zoo import OPTIMIZERS
from torch import Tensor, nn

from plait.job.job import Job
from plait.run.interpret.serial import Reduce
from plait.run.verify import verify

LARGE = {"resnet_bn", "lstm", "hf_gpt2", "hf_llama", "hf_bert", "hf_vit", "hf_t5", "encoder"}
"""Graphs of 300 nodes and more."""
RANKS = [(name, 3) for name in CASES]
RANKS += [(name, (2, 4)[turn % 2]) for turn, name in enumerate(name for name in CASES if name not in LARGE)]
"""3 ranks for all, as their shares are unequal; 2 and 4 in turn, of small graphs."""
FORMS = ("class_weights", "masked_gpt", "small_batch_norm", "gpt_dropout", "contrastive", "other_norms")
"""One case of every kind: weighted and masked means, batch statistics, random masks, samples that meet."""


def as_trained(name: str) -> dict[str, Any]:
    """A second size is another capture and another program, and no matter of a model: small ones stand for all."""
    samples = STEPS * BATCH if name in LARGE or name == "moe_capacity" else NUM_SAMPLES
    return {"optimizer": "momentum", "clip_norm": 1.0, "num_samples": samples}


@cache
def one_rank(name: str, **changes: Any) -> Trained:
    """The reference: the plan `single`."""
    return train(name, 1, **changes)


def assert_equal(found: Trained, wanted: Trained, **tolerances: float) -> None:
    wrong = compare(found, wanted, **tolerances)
    assert not wrong, "\n".join(wrong[:8])


def losses_of(name: str) -> dict[str, float]:
    """Of the user's own code: where it casts to float32 inside, it is no better."""
    inside = CASES[name].float32_inside
    return {"loss_tolerance": 1e-6, "tolerance": 1e-5, "floor": 1e-6} if inside else {}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.dropout])
def test_single_equals_a_plain_eager_loop(name: str) -> None:
    wanted = train_eagerly(name, **as_trained(name))
    assert_equal(one_rank(name, **as_trained(name)), wanted, **losses_of(name))


@pytest.mark.parametrize(("name", "ranks"), RANKS)
def test_ranks_equal_single(name: str, ranks: int) -> None:
    assert_equal(train(name, ranks, **as_trained(name)), one_rank(name, **as_trained(name)))


@pytest.mark.parametrize("name", ["mlp", *FORMS])
def test_ranks_with_empty_shares_equal_single(name: str) -> None:
    """8 ranks for 7 and 5 samples: one rank, then three have none."""
    assert_equal(train(name, 8), one_rank(name))


@pytest.mark.parametrize("name", ["linear", "class_weights"])
def test_sixty_four_ranks_equal_single(name: str) -> None:
    assert_equal(
        train(name, 64, batch=70, num_samples=140, steps=2),
        one_rank(name, batch=70, num_samples=140, steps=2),
    )


def test_a_batch_of_one_sample() -> None:
    for name in ("mlp", "gpt_dropout"):
        assert_equal(train(name, 2, batch=1, steps=2), one_rank(name, batch=1, steps=2))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["mlp", *FORMS])
def test_accumulation(name: str, ranks: int) -> None:
    """Micro-batches down to one sample; where samples do not meet, the step is the same as without accumulation."""
    case = CASES[name]
    accumulate = 2 if case.batch_statistics else 3  # one value a channel has no unbiased variance
    if ranks > 1:
        assert_equal(
            train(name, ranks, accumulate=accumulate, clip_norm=0.5),
            one_rank(name, accumulate=accumulate, clip_norm=0.5),
        )
    elif case.separable and not case.dropout and not case.batch_statistics:
        assert_equal(one_rank(name, accumulate=accumulate, clip_norm=0.5), one_rank(name, clip_norm=0.5))
    else:
        assert compare(one_rank(name, accumulate=accumulate, clip_norm=0.5), one_rank(name)), (
            "micro-batches change these"
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str) -> None:
    wanted = train_eagerly("mlp", optimizer=optimizer, clip_norm=1.0)
    assert_equal(one_rank("mlp", optimizer=optimizer, clip_norm=1.0), wanted)
    assert_equal(train("mlp", 3, optimizer=optimizer, clip_norm=1.0), wanted)


@pytest.mark.parametrize("bucket_mib", [0.0, 0.002])
def test_buckets_do_not_change_what_is_computed(bucket_mib: float) -> None:
    assert_equal(train("gpt_tied", 3, bucket_mib=bucket_mib, steps=1), one_rank("gpt_tied", steps=1))


def test_dropout_masks_depend_on_the_seed_and_the_step_alone() -> None:
    wanted = one_rank("gpt_dropout", clip_norm=None)
    assert_equal(train("gpt_dropout", 3, clip_norm=None), wanted)
    other = train("gpt_dropout", 1, seed=1, shuffle=False)
    same_weights = train("gpt_dropout", 1, shuffle=False)
    assert compare(other, same_weights), "another seed draws other masks"


def test_every_step_draws_other_masks() -> None:
    """The same samples and the same weights, so only the masks differ."""
    found = train("alexnet", 1, num_samples=BATCH, shuffle=False, optimizer="sgd", schedule=lambda step: 0.0)
    assert len(set(found.losses)) == STEPS


@pytest.mark.parametrize("name", ["mlp", "class_weights", "small_batch_norm"])
def test_fp32(name: str) -> None:
    """Gradients of step 1 within 1e-5; weights within 10 times of what halving the batch of one process changes."""
    wanted = train(name, 1, dtype=torch.float32)
    found = train(name, 3, dtype=torch.float32)
    for key, tensor in wanted.gradients[0].items():
        norm = sum(float(g.square().sum()) for g in wanted.gradients[0].values()) ** 0.5
        allowed = 1e-5 * max(float(tensor.abs().max()), norm)
        assert float((found.gradients[0][key] - tensor).abs().max()) <= allowed, key
    assert found.losses[0] == pytest.approx(wanted.losses[0], rel=1e-5)
    self_difference = 1e-6
    if not CASES[name].batch_statistics:
        halved = train(name, 1, dtype=torch.float32, accumulate=2)
        self_difference += max(_relative(halved.state[key], wanted.state[key]) for key in wanted.state)
    worst = max(_relative(found.state[key], wanted.state[key]) for key in wanted.state)
    assert worst <= 10 * self_difference


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("name", ["mlp", "gpt", "small_batch_norm"])
def test_bf16(name: str) -> None:
    """bf16 keeps 8 bits: two right answers differ by about 2**-8 of a tensor's norm; masters stay in fp32."""
    changes: dict[str, Any] = {"dtype": torch.float32, "precision": "bf16", "steps": 1}
    wanted, found = train(name, 1, **changes), train(name, 2, **changes)
    assert_equal(found, wanted, tolerance=5e-2, floor=5e-3, loss_tolerance=1e-2)
    assert all(tensor.dtype != torch.bfloat16 for tensor in found.state.values())
    assert compare(found, train(name, 1, dtype=torch.float32, steps=1), tolerance=1e-6, floor=1e-7), (
        "bf16 must round"
    )


# --- a wrong reduction is seen ------------------------------------------------------------------------------


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def without_the_last(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors[:-1])).sum(0)


def last_twice(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors, tensors[-1]]).sum(0)


@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        ("mse", mean_of),  # where the weight is reduced too, a mean of totals over a mean of weights is right
        ("small_batch_norm", mean_of),
        ("mlp", without_the_last),
        ("masked_gpt", without_the_last),
        ("mlp", last_twice),
        ("small_batch_norm", last_twice),
    ],
)
def test_a_wrong_reduction_is_seen(name: str, reduce: Reduce) -> None:
    wrong = compare(train(name, 3, reduce=reduce, steps=1), one_rank(name, steps=1))
    assert any("gradient" in line for line in wrong)


def test_complaint_04_verify_names_the_first_tensor_that_differs() -> None:
    job = case_job("mlp", torch.float64)
    assert verify(job, "ddp", 2, steps=1, serial=True).ok
    found = verify(job, "ddp", 2, steps=1, serial=True, reduce=without_the_last)
    assert not found.ok
    assert found.first is not None
    assert found.first.kind in ("loss", "gradient")


# --- what users of other systems complain about -------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 2), (1, 7), (2, 1), (2, 3), (3, 2), (4, 4)])
@pytest.mark.parametrize("name", ["masked_gpt", "ignore_index", "class_weights"])
def test_complaint_03_ragged_masks_are_averaged_over_the_whole_batch(
    name: str, ranks: int, accumulate: int
) -> None:
    wanted = train_eagerly(name, torch.float32, steps=1)
    found = train(name, ranks, dtype=torch.float32, accumulate=accumulate, steps=1)
    assert_equal(found, wanted, tolerance=1e-5, floor=1e-6, loss_tolerance=1e-5)


def test_complaint_03_unequal_shares_are_weighted() -> None:
    numbers = (-0.00134, -0.00461, -0.00279, 0.06524, 0.10746)
    job = Job(
        model=lambda: nn.Linear(1, 1, bias=False),
        data=[(torch.tensor([value]), torch.zeros(1)) for value in numbers],
        loss=lambda output, target: output.mean(),
        optimizer=OPTIMIZERS["sgd"],
        batch=5,
        steps=1,
        shuffle=False,
    )
    found = train_job(job, 2, torch.float64)
    gradient = float(found.gradients[0]["weight"])
    assert gradient == pytest.approx(sum(numbers) / 5, rel=1e-6)  # the data is float32
    assert round(gradient, 4) == 0.0328
    mean_of_means = (sum(numbers[:3]) / 3 + sum(numbers[3:]) / 2) / 2
    assert round(mean_of_means, 4) == 0.0417


@pytest.mark.parametrize("name", ["mlp", "class_weights"])
def test_complaint_05_the_clip_norm_is_equal_on_all_ranks_and_to_one_device(name: str) -> None:
    wanted = train_eagerly(name, clip_norm=0.1)
    for ranks in (1, 2, 4):
        found = train(name, ranks, clip_norm=0.1)
        for ours, theirs in zip(found.norms, wanted.norms, strict=True):
            assert len(ours) == ranks
            assert len(set(ours)) == 1
            assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
            assert ours[0] > 0.1, "the norm is that before clipping"
        assert_equal(found, wanted)


def _steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (lambda step: 0.1 / (step + 1), [0.1, 0.05, 0.1 / 3]),
        (lambda optimizer: _steps(optimizer), [0.05, 0.05, 0.005]),
    ],
    ids=["function", "scheduler"],
)
def test_complaint_06_the_learning_rate_of_a_step_does_not_depend_on_the_ranks(
    schedule: Any, wanted: list[float]
) -> None:
    for ranks in (1, 2, 4):
        for accumulate in (1, 3):
            found = train("mlp", ranks, schedule=schedule, accumulate=accumulate)
            assert found.rates == pytest.approx(wanted)
    assert_equal(train("mlp", 3, schedule=schedule), train("mlp", 1, schedule=schedule))
    assert compare(train("mlp", 1, schedule=schedule), one_rank("mlp")), "the schedule reaches the update"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_complaint_15_each_of_97_samples_counts_exactly_once(ranks: int) -> None:
    found = train("class_weights", ranks, batch=16, num_samples=97, steps=7)
    assert sorted(sample for step in found.ids for sample in step) == list(range(97))
    assert [len(step) for step in found.ids] == [16] * 6 + [1]
    counted = train("mlp", ranks, batch=16, num_samples=97, steps=7)
    assert counted.weights == [16.0] * 6 + [1.0]
    assert_equal(counted, one_rank("mlp", batch=16, num_samples=97, steps=7))


def test_complaint_16_unused_parameters_are_named_and_left_alone() -> None:
    graph = captures("unused_parameter", torch.float64, "fp32").of_size(BATCH)
    assert graph.unused == ("forgotten.weight", "forgotten.bias")
    found = train("unused_parameter", 2, optimizer="momentum")
    start = case_job("unused_parameter", torch.float64).build_model().double().state_dict()
    assert torch.equal(found.state["forgotten.weight"], start["forgotten.weight"])
    assert not torch.equal(found.state["used.weight"], start["used.weight"])


@pytest.mark.parametrize("name", ["gpt_tied", "hf_gpt2"])
def test_complaint_17_tied_weights_are_one_parameter(name: str) -> None:
    graph = captures(name, torch.float64, "fp32").of_size(BATCH)
    ((alias, counted),) = graph.aliases.items()
    assert counted in graph.gradients
    assert alias not in graph.gradients
    found = train(name, 3, **as_trained(name))
    assert torch.equal(found.state[alias], found.state[counted])


def test_complaint_25_batch_norm_uses_the_statistics_of_all_ranks() -> None:
    """Running statistics and counts too; each rank on its own is the opt-out, and is not the same."""
    wanted = one_rank("small_batch_norm")
    found = train("small_batch_norm", 3)
    assert {key for key in found.state if "running" in key or "num_batches" in key} <= wanted.state.keys()
    assert int(found.state["1.num_batches_tracked"]) == STEPS
    assert_equal(found, wanted)
    local = train("small_batch_norm", 3, batch_norm="local")
    wrong = compare(local, wanted)
    assert any("gradient" in line for line in wrong)
    assert any("running_mean" in line or "running_var" in line for line in wrong)
    assert local.spread == 0.0


def test_local_batch_norm_with_an_empty_share() -> None:
    """The last norm sees one value a channel on each rank, whose unbiased variance torch cannot give either."""
    found = train("small_batch_norm", 8, batch_norm="local", batch=7, num_samples=NUM_SAMPLES, steps=1)
    defined = [tensor for name, tensor in found.state.items() if name != "6.running_var"]
    assert all(bool(tensor.double().isfinite().all()) for tensor in defined)
    assert found.spread == 0.0
