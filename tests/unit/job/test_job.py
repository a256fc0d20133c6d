"""A Job that is wrong cannot be built, and the functions on it do what its fields say."""

import dataclasses
import functools
import pickle
import random
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.errors import JobError
from plait.job import Job, Until, map_tensors, tensors_in


def make(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "data": (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 8,
    }
    return Job(**{**fields, **changes})


def test_neither_epochs_nor_steps_means_one_epoch() -> None:
    assert (make().epochs, make().steps) == (1, None)
    assert (make(steps=5).epochs, make(steps=5).steps) == (None, 5)
    assert make().total_steps(17) == 3
    assert make(epochs=2).total_steps(16) == 4
    assert make(steps=5).total_steps(None) == 5
    assert make(epochs=2).total_steps(None) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": None}, "neither loss nor objective"),
        ({"objective": lambda model, batch: 0}, "both loss and objective"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"batch": True}, "batch is True"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": -1}, "steps is -1"),
        ({"epochs": 1, "steps": 1}, "both epochs=1 and steps=1"),
        ({"seed": -1}, "seed is -1"),
        ({"precision": "fp64"}, "precision is 'fp64'"),
        ({"batch_norm": "sync"}, "batch_norm is 'sync'"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"shuffle": 1}, "shuffle is 1"),
        ({"data": None}, "data is None"),
        ({"model": 3}, "model is the int 3"),
        ({"optimizer": "sgd"}, "optimizer is the str 'sgd'"),
        ({"schedule": 0.1}, "schedule is the float 0.1"),
        ({"collate": 1}, "collate is the int 1"),
        ({"metrics": [len]}, "metrics is a list"),
        ({"metrics": {"a": 1}}, "metrics ['a']"),
        ({"metrics": {"loss": len}}, "a metric is called loss"),
        ({"evaluate_every": 5}, "evaluate_every=5 without evaluate"),
        ({"until": 3}, "until is the int 3"),
        ({"until": Until(metric="accuracy", target=0.9)}, "'accuracy'"),
    ],
)
def test_a_wrong_field_is_refused_with_its_value_and_a_fix(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        make(**changes)
    assert words in caught.value.what
    assert caught.value.fix


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(JobError, match=r"batch is 0.*seed is -3"):
        make(batch=0, seed=-3)


def test_complaint_08_accumulate_larger_than_batch_is_one_line_with_both_numbers() -> None:
    with pytest.raises(JobError) as caught:
        make(batch=4, accumulate=5)
    assert "accumulate=5 is larger than batch=4" in caught.value.what
    assert "\n" not in caught.value.what
    assert make(batch=4, accumulate=4).accumulate == 4


@pytest.mark.parametrize(
    "fields",
    [{}, {"target": float("inf")}, {"patience": 0}, {"patience": 1.5}, {"target": 1.0, "mode": "least"}],
)
def test_a_wrong_until_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        Until(**fields)
    assert caught.value.fix


def test_whole_numbers_of_numpy_become_plain_ones_and_the_job_is_frozen() -> None:
    job = make(batch=np.int64(4))
    assert type(job.batch) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.batch = 2  # type: ignore[misc]
    assert dataclasses.replace(job, steps=3, epochs=None).steps == 3


def test_a_job_with_lambdas_and_closures_travels_by_cloudpickle() -> None:
    width = 5
    job = make(model=lambda: nn.Linear(width, 3), until=Until(patience=2))
    travelled = pickle.loads(cloudpickle.dumps(job))
    assert travelled.build_model().in_features == width
    assert travelled.until == job.until


def test_the_model_depends_on_the_seed_alone() -> None:
    first = make(seed=3).build_model()
    drawn = (random.random(), np.random.rand())
    torch.rand(5)
    again = make(seed=3).build_model()
    assert (random.random(), np.random.rand()) == drawn
    other = make(seed=4).build_model()
    assert torch.equal(first.weight, again.weight)  # type: ignore[arg-type]
    assert not torch.equal(first.weight, other.weight)  # type: ignore[arg-type]


def test_a_module_instance_and_a_class_are_taken() -> None:
    module = nn.Linear(2, 2)
    assert make(model=module).build_model() is module

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)

    assert isinstance(make(model=Net).build_model(), Net)


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(JobError, match=r"model\(\) returned the int 3"):
        make(model=lambda: 3).build_model()
    with pytest.raises(JobError, match=r"no trainable parameter \(0 frozen"):
        make(model=nn.ReLU).build_model()
    with pytest.raises(JobError, match=r"no trainable parameter \(2 frozen"):
        make(model=lambda: nn.Linear(2, 2).requires_grad_(False)).build_model()


class Lazy(nn.Module):
    """Random numbers, statistics and a counter on the way to what has no shape yet."""

    def __init__(self, reach: bool = True) -> None:
        super().__init__()
        self.norm, self.first, self.calls, self.reach = nn.LazyBatchNorm1d(), nn.LazyLinear(4), 0, reach
        self.last = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = nn.functional.dropout(self.first(self.norm(x)))
        return self.last(h) if self.reach else h


def test_lazy_modules_get_the_weights_of_the_users_own_first_forward() -> None:
    job = make(model=Lazy, data=(torch.randn(8, 3), torch.arange(8) % 2), batch=6, seed=5)
    torch.manual_seed(5)
    theirs = Lazy()
    theirs(torch.zeros(6, 3))
    for ours in (job.build_model(), replace(job, model=Lazy()).build_model()):
        assert isinstance(ours, Lazy) and ours.calls == 0 and type(ours.first) is nn.Linear
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        assert not any(bool(buffer.any()) for name, buffer in ours.named_buffers() if "var" not in name)
    with pytest.raises(JobError, match=r"last\.weight of Lazy has no shape yet .* misses it"):
        replace(job, model=lambda: Lazy(reach=False)).build_model()
    with pytest.raises(JobError, match="gives its lazy modules their shapes, failed"):
        make(model=lambda: nn.Sequential(nn.LazyLinear(2), nn.Linear(7, 2))).build_model()


def test_the_optimizer_gets_parameters_or_pairs_by_the_name_of_its_argument() -> None:
    named = list(nn.Linear(2, 2).named_parameters())
    plain = make(optimizer=functools.partial(torch.optim.AdamW, lr=1.0)).build_optimizer(named)
    assert plain.param_groups[0]["params"][0] is named[0][1]

    def no_decay(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        biases = [parameter for name, parameter in named_parameters if name.endswith("bias")]
        others = [parameter for name, parameter in named_parameters if not name.endswith("bias")]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.1)

    grouped = make(optimizer=no_decay).build_optimizer(named)
    assert [len(group["params"]) for group in grouped.param_groups] == [1, 1]
    assert grouped.param_groups[1]["params"][0] is named[1][1]


def test_an_optimizer_that_cannot_be_used_is_refused() -> None:
    model, outside = nn.Linear(2, 2), nn.Linear(5, 7)
    named = list(model.named_parameters())
    with pytest.raises(JobError, match=r"returned None, not a torch\.optim\.Optimizer"):
        make(optimizer=lambda params: None).build_optimizer(named)
    with pytest.raises(JobError, match=r"uses 2 of 2 parameters .* \(7, 5\)"):
        make(optimizer=lambda params: torch.optim.SGD(outside.parameters(), lr=0.1)).build_optimizer(named)
    with pytest.raises(JobError, match=r"LBFGS\.step needs a closure"):
        make(optimizer=torch.optim.LBFGS).build_optimizer(named)


def test_the_loss_form_splits_a_batch_into_inputs_and_target() -> None:
    def add(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second

    job = make(loss=nn.MSELoss())
    batch = (torch.ones(3), torch.ones(3), torch.zeros(3))
    assert job.objective_of(add, batch) == torch.tensor(4.0)
    assert job.objective_of(add, list(batch)) == torch.tensor(4.0)


@pytest.mark.parametrize("batch", [torch.zeros(3), (torch.zeros(3),), {"x": torch.zeros(3)}])
def test_the_loss_form_refuses_a_batch_without_a_target(batch: Any) -> None:
    with pytest.raises(JobError, match="inputs, target") as caught:
        make().objective_of(nn.Identity(), batch)
    assert caught.value.fix is not None
    assert "objective=" in caught.value.fix


@pytest.mark.parametrize(
    ("output", "words"), [(None, "None"), (3.0, "the float 3.0"), ({"a": 1}, "keys ..a"), ([], "list")]
)
def test_a_model_that_returns_no_tensor_is_named(output: Any, words: str) -> None:
    with pytest.raises(JobError, match=f"the model returned .*{words}.* no tensor"):
        make().objective_of(lambda x: output, (torch.zeros(1), torch.zeros(1)))


def test_structured_model_outputs_reach_the_loss() -> None:
    class Output(NamedTuple):
        logits: torch.Tensor

    class Own:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    job = make(loss=lambda output, target: (output.logits - target).abs().mean())
    batch = (torch.ones(2), torch.zeros(2))
    assert job.objective_of(Output, batch) == torch.tensor(1.0)
    assert job.objective_of(Own, batch) == torch.tensor(1.0)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(3), r"Tensor of shape \(3,\)"),
        (torch.zeros(1), r"Tensor of shape \(1,\)"),
        (0.5, "the float 0.5"),
        (None, "None"),
        ((torch.zeros(()), "a"), "the str 'a'"),
        ((torch.zeros(()), torch.zeros(2)), r"\(2,\)"),
        ((torch.zeros(()),) * 3, "tuple of"),
    ],
)
def test_a_result_that_is_no_scalar_is_named(result: Any, words: str) -> None:
    job = make(loss=None, objective=lambda model, batch: result)
    with pytest.raises(JobError, match=f"the objective returned .*{words}"):
        job.objective_of(nn.Identity(), {})
    with pytest.raises(JobError, match="the loss returned"):
        make(loss=lambda output, target: result).objective_of(nn.Identity(), (torch.zeros(2), torch.zeros(2)))


def test_the_objective_form_returns_a_scalar_or_total_and_weight() -> None:
    total = torch.tensor(3.0, dtype=torch.bfloat16)
    job = make(loss=None, objective=lambda model, batch: (total, 257))
    result = job.objective_of(nn.Identity(), {})
    assert isinstance(result, tuple)
    assert result[0] is total
    # bf16 has no 257
    assert result[1].item() == 257
    scalar = make(loss=None, objective=lambda model, batch: model(batch["x"]).sum())
    assert scalar.objective_of(nn.Identity(), {"x": torch.ones(2)}) == torch.tensor(2.0)


def test_metrics_of_the_loss_form_share_one_forward_pass() -> None:
    calls = []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x

    def correct(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output == target).sum(), len(target)

    job = make(loss=nn.MSELoss(), metrics={"accuracy": correct, "size": lambda output, target: len(target)})
    measured = job.measures_of(model, (torch.ones(4), torch.ones(4)))
    assert list(measured) == ["loss", "accuracy", "size"]
    assert len(calls) == 1
    total, weight = measured["accuracy"]
    assert (total.item(), weight.item()) == (4, 4)
    assert measured["size"] == torch.tensor(4.0)


def test_metrics_of_the_objective_form_get_model_and_batch() -> None:
    job = make(
        loss=None, objective=lambda model, batch: model(batch), metrics={"twice": lambda m, b: 2 * m(b)}
    )
    assert job.measures_of(nn.Identity(), torch.tensor(3.0))["twice"] == torch.tensor(6.0)
    wrong = dataclasses.replace(job, metrics={"bad": lambda m, b: "no"})
    with pytest.raises(JobError, match="the metric bad returned the str 'no'"):
        wrong.measures_of(nn.Identity(), torch.tensor(3.0))


def test_autocast_only_for_bf16() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with make(precision="bf16").autocast("cpu"):
        assert layer(x).dtype == torch.bfloat16
    with make().autocast("cpu"):
        assert layer(x).dtype == torch.float32


def test_tensors_of_a_batch_are_found_and_replaced_wherever_they_are() -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: str

    @dataclasses.dataclass
    class Own:
        z: torch.Tensor

    batch = {"a": [torch.ones(1)], "b": (Pair(torch.ones(1), "text"), 5), "c": Own(torch.ones(1))}
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert [tensor.item() for tensor in tensors_in(doubled)] == [2, 2, 2]
    assert [tensor.item() for tensor in tensors_in(batch)] == [1, 1, 1]
    assert doubled["b"][0].y == "text"
    assert isinstance(doubled["b"][0], Pair)
