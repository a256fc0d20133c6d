"""Taking and restoring a model and an optimizer: bit for bit, or refused with both shapes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.run.checkpoint.checkpoint_states import Tied, assert_equal, collect, small_state, train
from torch import nn

from plait.errors import CheckpointError
from plait.run.checkpoint.state import (
    TrainingState,
    check_same_options,
    collect_model,
    collect_optimizer,
    restore_model,
    restore_optimizer,
    snapshot,
)
from plait.run.checkpoint.store import load_checkpoint, save_checkpoint

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "adam-tensor-lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complaint_13_resumed_training_is_bitwise_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, steps=range(3))
    optimizer.param_groups[0]["lr"] *= 0.5
    state = collect(model, optimizer, step=3)
    save_checkpoint(tmp_path, state)
    expected = train(model, optimizer, steps=range(3, 7))

    torch.manual_seed(2)
    resumed = Tied()
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    loaded = load_checkpoint(tmp_path)
    restore_model(resumed, loaded)
    restore_optimizer(resumed_optimizer, resumed.named_parameters(), loaded.optimizer)
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(loaded.extra["random"])), dtype=torch.uint8))
    assert resumed_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert train(resumed, resumed_optimizer, steps=range(3, 7)) == expected
    assert_equal(collect(resumed, resumed_optimizer, step=7), collect(model, optimizer, step=7))


def test_optimizer_groups_keep_their_own_options_and_types() -> None:
    model = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "lr": 0.5},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.7, 0.8))
    state = collect_optimizer(optimizer, model.named_parameters())
    assert [group["names"] for group in state.groups] == [["weight"], ["bias"]]
    plain: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    other = torch.optim.AdamW(plain, foreach=True)
    restore_optimizer(other, model.named_parameters(), state)
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(0.5, 0.01), (0.1, 0.0)]
    assert other.param_groups[0]["betas"] == (0.7, 0.8)
    assert other.param_groups[0]["foreach"] is True, "how the update is run is the new process's choice"


def test_optimizer_mismatch_names_the_first_parameter_and_changes_nothing() -> None:
    saved, other = nn.Linear(3, 2), nn.Linear(4, 2)
    state = collect_optimizer(torch.optim.Adam(saved.parameters(), lr=0.5), saved.named_parameters())
    optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"'weight' differs: the model has \(2, 4\), the checkpoint has \(2, 3\)"
    ):
        restore_optimizer(optimizer, other.named_parameters(), state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(
        CheckpointError, match=r"'bias' differs: .*missing .of 1 parameters., the checkpoint has \(2,\)"
    ):
        restore_optimizer(torch.optim.Adam([saved.weight]), saved.named_parameters(), state)
    groups: list[dict[str, Any]] = [{"params": [saved.weight]}, {"params": [saved.bias]}]
    two = torch.optim.Adam(groups)
    with pytest.raises(CheckpointError, match="has 2 parameter groups; the checkpoint has 1"):
        restore_optimizer(two, saved.named_parameters(), state)


@pytest.mark.parametrize("betas", [[0.7], [0.7, 0.8, 0.9], {}, None, ["x", 0.8], [[0.7], 0.8]])
def test_an_option_of_another_form_is_refused_and_changes_nothing(betas: Any) -> None:
    model = nn.Linear(3, 2)
    state = collect_optimizer(torch.optim.Adam(model.parameters(), lr=0.5), model.named_parameters())
    state.groups[0]["betas"] = betas
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="the optimizer has betas="):
        restore_optimizer(optimizer, model.named_parameters(), state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_how_an_update_is_run_is_not_taken_from_a_checkpoint() -> None:
    model = nn.Linear(3, 2)
    state = collect_optimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    state.groups[0] |= {"capturable": True, "differentiable": True, "params": []}
    optimizer = torch.optim.Adam(model.parameters())
    restore_optimizer(optimizer, model.named_parameters(), state)
    group = optimizer.param_groups[0]
    assert (group["capturable"], group["differentiable"], len(group["params"])) == (False, False, 2)


def test_restore_model_mismatch_changes_nothing() -> None:
    wide, narrow = nn.Linear(3, 2), nn.Linear(3, 1)
    before = narrow.weight.clone()
    parameters, buffers, _, _ = collect_model(wide)
    with pytest.raises(
        CheckpointError, match=r"'weight' differs: the model has \(1, 3\), the checkpoint has \(2, 3\)"
    ):
        restore_model(narrow, TrainingState(step=0, parameters=parameters, buffers=buffers))
    assert torch.equal(narrow.weight, before)


def test_snapshot_shares_no_memory() -> None:
    state = small_state(1)
    copied = snapshot(state)
    state.parameters["w"].zero_()
    state.optimizer.tensors["w"]["exp_avg"].zero_()
    state.optimizer.values["w"]["count"] = 9
    assert_equal(copied, small_state(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1}, "whole number"),
        ({"aliases": {"x": "nowhere"}}, "tied to 'nowhere'"),
        ({"aliases": {"b": "w"}}, "also held on its own"),
        ({"aliases": {"w": "b"}}, "also held on its own"),
        ({"buffers": {"w": torch.ones(1)}}, "both a parameter and a buffer"),
        ({"transient": ("w",)}, "not a buffer"),
    ],
)
def test_contradictory_states_cannot_be_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        replace(small_state(1), **fields)


def test_options_that_are_not_the_jobs_are_refused() -> None:
    own = [{"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.01, "params": [], "foreach": None}]
    saved = [{"lr": 0.05, "betas": [0.9, 0.99], "weight_decay": 0.01, "names": [], "shapes": [], "newer": 1}]
    check_same_options(own, saved, moved=("lr",))
    with pytest.raises(
        CheckpointError, match=r"group 0 .* weight_decay=0.01 in the job, weight_decay=7 in the check"
    ):
        check_same_options(own, [saved[0] | {"weight_decay": 7}], moved=("lr",))
    with pytest.raises(CheckpointError, match="betas"):
        check_same_options(own, [saved[0] | {"betas": [0.0, 0.99]}], moved=("lr",))
    check_same_options(own, [saved[0] | {"betas": [0.0, 0.99]}], moved=("lr", "betas"))
