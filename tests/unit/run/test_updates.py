"""Update rules against plain PyTorch loops, written out here, in float64: losses, gradients, weights, optimizer state;
under every plan whose ranks march in step, saved on the way and gone on with under the next one.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.unit.run.updates import (
    PLANS,
    STEPS,
    Net,
    Plain,
    assert_equals,
    data,
    finish,
    fresh,
    job_of,
    note,
    ranks_of,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from plait.api.train import resume, train
from plait.callbacks import Watching
from plait.errors import JobError, PlanError
from plait.job.updates.average import Average
from plait.job.updates.freeze import Freeze
from plait.run.verify import verify

NEXT = dict(pairwise([*PLANS, next(iter(PLANS))]))
"""The plan under which a run of each plan is resumed."""


def several() -> dict[str, object]:
    return {
        "optimizer": {
            "encoder": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
            "*.bias": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
            "*": lambda ps: torch.optim.AdamW(ps, lr=0.02),
        },
        "schedule": {
            "encoder": lambda step: 0.1 / (1 + step),
            "*": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        },
    }


@cache
def plain_several() -> Plain:
    plain = Plain()
    model, batch = fresh(job_of(**several()))
    named = dict(model.named_parameters())
    encoder = [p for n, p in named.items() if n.startswith("encoder.")]
    biases = [named["norm.bias"], named["head.bias"]]
    sgd = torch.optim.SGD(encoder, lr=0.1, momentum=0.9, weight_decay=0.01)
    adagrad = torch.optim.Adagrad(biases, lr=0.05)
    adamw = torch.optim.AdamW([named["norm.weight"], named["head.weight"]], lr=0.02)
    halved = torch.optim.lr_scheduler.StepLR(adamw, 2, gamma=0.5)
    for step in range(STEPS):
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        note(plain, model, loss)
        sgd.param_groups[0]["lr"] = 0.1 / (1 + step)
        sgd.step()
        adagrad.step()
        adamw.step()
        halved.step()
    return finish(plain, model, sgd, adagrad, adamw)


@pytest.mark.parametrize("plan", PLANS)
def test_several_optimizers_each_with_its_schedule(plan: str) -> None:
    assert_equals(job_of(**several()), plain_several(), plan, PLANS[plan], NEXT[plan])


def frozen() -> dict[str, object]:
    return {
        "optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1),
        "freeze": [
            Freeze(parameters="encoder", until=4),
            Freeze(parameters="head.bias", first=1, unit="epoch"),
        ],
        "clip_norm": {"encoder.0": 0.05, "*": 0.3},
        "clip_value": {"*.bias": 0.01},
    }


@cache
def plain_frozen() -> Plain:
    plain = Plain()
    model, batch = fresh(job_of(**frozen()))
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        for name, parameter in named.items():
            if name.startswith("encoder."):
                parameter.requires_grad_(step >= 4)
        named["head.bias"].requires_grad_(step < 4)  # an epoch has four steps
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        adamw.zero_grad()
        loss.backward()
        first = [p for n, p in named.items() if n.startswith("encoder.0.")]
        nn.utils.clip_grad_norm_(first, 0.05)
        nn.utils.clip_grad_norm_([p for p in named.values() if all(p is not q for q in first)], 0.3)
        nn.utils.clip_grad_value_([p for n, p in named.items() if n.endswith(".bias")], 0.01)
        note(plain, model, loss)
        adamw.step()
    return finish(plain, model, adamw)


@pytest.mark.parametrize("plan", PLANS)
def test_frozen_phases_and_clipping_by_pattern_and_value(plan: str) -> None:
    last = assert_equals(job_of(**frozen()), plain_frozen(), plan, PLANS[plan], NEXT[plan])
    steps = {name: float(kept["step"]) for name, kept in last.optimizer.tensors.items()}
    assert steps["encoder.0.weight"] == 2, "state begins with the first gradient"
    assert steps["head.bias"] == 4, "and rests while there is none"


@pytest.mark.parametrize("plan", PLANS)
def test_no_gradients_are_computed_of_what_is_frozen(plan: str) -> None:
    programs = ranks_of(job_of(**frozen()), plan, PLANS[plan]).programs
    early, late = (programs.at(step).for_sizes(programs.full_shares()) for step in (0, 4))
    names = [{n for own in p.classes for b in own.buckets for n in b.parameters} for p in (early, late)]
    assert not any(name.startswith("encoder.") for name in names[0]) and "encoder.0.weight" in names[1]
    flops = [sum(s.flops for own in p.classes for s in own.segments.values()) for p in (early, late)]
    assert flops[0] < 0.6 * flops[1]


class Reading(Net):
    """Runs eagerly: it asks for more than a graph knows."""

    def forward(self, x: Tensor) -> Tensor:
        seen.append([p.requires_grad for p in self.parameters()])
        return super().forward(x)[: len(x.tolist())]


seen: list[list[bool]] = []
"""What a forward has found."""


@pytest.mark.parametrize("plan", ["single", "zero3"])
def test_code_that_runs_eagerly_sees_what_is_frozen(plan: str) -> None:
    job = job_of(**frozen(), model=Reading)
    for step, told in ((0, [False] * 4 + [True] * 4), (4, [True] * 7 + [False])):
        ranks = ranks_of(job, plan, PLANS[plan])
        seen.clear()
        ranks.run(step)
        assert ranks.programs.capture_error is not None and seen[-1] == told


@pytest.mark.parametrize("plan", ["zero3", "1f1b"])
def test_a_phase_in_which_nothing_is_trained(plan: str) -> None:
    job = job_of(**frozen() | {"freeze": [Freeze(parameters="*", first=1, until=2)]})
    proof = verify(job, plan, 2, steps=3, serial=True)
    assert proof.ok and proof.eager, (proof.first, proof.eager_first)


class Normed(Net):
    """With buffers that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.insert(1, nn.BatchNorm1d(8))


def averaged(kind: str) -> dict[str, object]:
    rule = (
        Average(kind="ema", decay=0.7)
        if kind == "ema"
        else Average(kind="swa", start=1, every=2, buffers=True)
    )
    return {
        "model": Normed, "accumulate": 1, "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.5), "average": rule,
        "schedule": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5, cooldown=1),
        "follow": "train_loss",
    }  # fmt: skip


@cache
def plain_averaged(kind: str) -> Plain:
    plain = Plain()
    model, batch = fresh(job_of(**averaged(kind)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    plateau = ReduceLROnPlateau(sgd, patience=0, factor=0.5, cooldown=1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    swa = AveragedModel(model)
    statistics = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        note(plain, model, loss)
        sgd.step()
        plateau.step(loss.item())
        ema.update_parameters(model)
        if step in (1, 3, 5):
            swa.update_parameters(model)
            statistics.append({n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()})
    assert sgd.param_groups[0]["lr"] < 0.5, "the rate was lowered on the way"
    chosen = ema if kind == "ema" else swa
    plain.average = {n: t.detach().clone() for n, t in chosen.module.state_dict().items()}
    if kind == "swa":  # torch's own use_buffers fails on counters
        plain.average |= {n: torch.stack([each[n] for each in statistics]).mean(0) for n in statistics[0]}
    return finish(plain, model, sgd)


@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("plan", PLANS)
def test_averaged_weights_and_a_rate_that_follows_the_loss(plan: str, kind: str) -> None:
    assert_equals(job_of(**averaged(kind)), plain_averaged(kind), plan, PLANS[plan], NEXT[plan])


def whole() -> dict[str, object]:
    return {
        "optimizer": {
            "*.bias": lambda ps: torch.optim.AdamW(ps, lr=0.02),
            "norm.weight": lambda ps: torch.optim.AdamW(ps, lr=0.02),
            "*": lambda ps: torch.optim.Muon(ps, lr=0.02),
        },
        "clip_norm": 0.5,
    }


@cache
def plain_whole() -> Plain:
    plain = Plain()
    model, batch = fresh(job_of(**whole()))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.02)
    for step in range(STEPS):
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        note(plain, model, loss)
        muon.step()
        adamw.step()
    return finish(plain, model, muon, adamw)


WHOLE = {"single": "zero1", "ddp": "zero3", "zero1": "ddp", "zero3": "1f1b", "1f1b": "single"}
"""Plans that leave tensors whole for who updates them, and those under which their runs are resumed."""


@pytest.mark.parametrize("plan", WHOLE)
def test_optimizers_of_whole_tensors_where_one_rank_can_update_each(plan: str) -> None:
    assert_equals(job_of(**whole()), plain_whole(), plan, PLANS[plan], WHOLE[plan])


class Together(torch.optim.SGD):
    """Divides by the norm of all gradients: nobody can update some tensors alone."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in used if p.grad is not None])
        for parameter in used:
            parameter.data -= 0.1 * parameter.grad / norm


def test_optimizers_that_need_more_than_a_rank_has_are_refused() -> None:
    with pytest.raises(
        PlanError, match="megatron cuts tensors into parts, but AdamW, Muon cannot update parts"
    ):
        ranks_of(job_of(**whole()), "megatron", PLANS["megatron"])
    for plan in ("zero1", "1f1b"):
        with pytest.raises(PlanError, match="Together cannot update some of them alone"):
            ranks_of(job_of(optimizer=Together), plan, PLANS[plan])
    ranks_of(job_of(optimizer=Together), "ddp", PLANS["ddp"])


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_follow_the_same_rules(servers: int) -> None:
    for fields, plain in ((several(), plain_several()), (frozen(), plain_frozen())):
        ranks = ranks_of(job_of(**fields), "server-sync", {"data": 2}, {"sync": {"servers": servers}})
        for step in range(STEPS):
            assert ranks.run(step)
            assert ranks.outcome.loss == pytest.approx(plain.losses[step], rel=1e-9)
        while ranks.turn():
            pass
        for name, weight in ranks.weights().items():
            torch.testing.assert_close(weight, plain.weights[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"clip_norm": {"encodr": 1.0}}, "clip_norm: no parameter is called 'encodr'"),
        ({"freeze": [Freeze(parameters="haed", until=2)]}, "freeze: no parameter is called 'haed'"),
        ({"optimizer": {"encoder": torch.optim.SGD}}, "none of which is for norm.weight"),
        ({"optimizer": {"*": torch.optim.SGD, "head": torch.optim.SGD}}, "by a pattern before it"),
        ({"optimizer": lambda ps: [torch.optim.SGD(ps), torch.optim.SGD(ps[:1])]}, "update encoder.0.weight"),
        ({"optimizer": lambda ps: torch.optim.LBFGS(ps)}, "needs a closure"),
        ({"schedule": {"head": lambda step: 0.1}}, "the optimizers are one alone"),
        ({"schedule": [lambda step: 0.1]}, "the optimizers are one alone"),
    ],
)
def test_rules_that_name_nothing_are_refused_before_the_run(fields: dict[str, object], told: str) -> None:
    with pytest.raises(JobError, match=told):
        ranks_of(job_of(**{"optimizer": torch.optim.SGD} | fields), "single", {})


@pytest.mark.parametrize("plan", ["server-async", "local-sgd", "easgd", "hogwild"])
def test_phases_need_ranks_that_march_in_step(plan: str) -> None:
    job = job_of(optimizer=torch.optim.SGD, freeze=[Freeze(parameters="head", until=2)])
    with pytest.raises(PlanError, match="have no such step in common"):
        ranks_of(job, plan, {"data": 2})


def test_a_list_of_optimizers_has_schedules_by_place() -> None:
    job = job_of(
        optimizer=lambda ps: [torch.optim.SGD(ps[:2], lr=0.1), torch.optim.SGD(ps[2:], lr=0.2)],
        schedule=[lambda step: 0.3, None],
    )
    ranks = ranks_of(job, "single", {})
    ranks.run(0)
    groups = ranks.machines[0].state.optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.3, 0.2]


def test_a_run_whose_phases_count_epochs_is_resumed(tmp_path: Path) -> None:
    """An epoch has four steps: the encoder is frozen before the run is saved, and trained after."""
    rules = {
        "optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.02),
        "freeze": [Freeze(parameters="encoder", until=1, unit="epoch")],
    }
    whole = train(job_of(**rules), "single", steps=6, out=tmp_path / "whole")
    train(job_of(**rules), "single", steps=3, out=tmp_path / "cut")
    resumed = resume(tmp_path / "cut", job=job_of(**rules), steps=6)
    assert resumed.losses == whole.losses[3:]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    assert not [line for line in resumed.notices if "holds nothing" in line], "frozen all along is not odd"


@pytest.mark.parametrize("follow", ["loss", "right"])
def test_a_rate_that_follows_evaluations_is_compared_without_them(follow: str, tmp_path: Path) -> None:
    """No step that is compared comes after an evaluation: the rate is the one that it begins with."""
    job = job_of(
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5), evaluate=data(), follow=follow,
        metrics={"right": lambda scores, y: (scores.argmax(-1) == y).float().mean()},
        schedule=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    )  # fmt: skip
    assert verify(job, "zero1", 2, serial=True, steps=2).ok
    heard: list[str] = []
    watching = Watching(listener=lambda event: heard.append(event.get("notice", "")))
    train(job, "single", steps=1, out=tmp_path / "run", watching=watching)
    assert [line for line in heard if line.startswith("capture checked")], heard
    with pytest.raises(JobError, match="no data to evaluate on"):
        train(replace(job, evaluate=None), "single", steps=1, out=tmp_path / "blind")
    with pytest.raises(PlanError, match="not measured at a moment"):
        train(replace(job, follow=None), "server-async", 2, steps=1, out=tmp_path / "apart")
