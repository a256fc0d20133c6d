"""Objectives that take turns (a WGAN with gradient penalty) against a plain PyTorch loop, written out here, in float64:
losses, gradients, weights, buffers, optimizer state; under every plan that allows it, and resumed under another.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.unit.run.updates import (
    BATCH,
    PLANS,
    Plain,
    assert_close,
    assert_equals,
    finish,
    fresh,
    note,
    ranks_of,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from plait.errors import JobError, PlanError
from plait.job.job import Job
from plait.job.updates.average import Average
from plait.job.updates.objectives import Objective
from plait.run.interpret.serial import add_up
from plait.run.verify import verify

ALLOWED = {"single": "ddp", "ddp": "zero1", "zero3": "megatron", "zero1": "single"}
"""Plans, and those under which their runs are resumed."""
STEPS = 8
"""Two rounds and two steps of a third: three of the critic, one of the generator."""


class Gan(nn.Module):
    """Both networks."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def critic_loss(model: Gan, batch: list[Tensor]) -> Tensor:
    real, noise, share = batch
    fake = model.generator(noise).detach()
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    return model.critic(fake).mean() - model.critic(real).mean() + 10 * penalty


def generator_loss(model: Gan, batch: list[Tensor]) -> tuple[Tensor, int]:
    _, noise, _ = batch
    return -model.critic(model.generator(noise)).sum(), len(noise)


def gan(same_draw: bool = False) -> Job:
    made = torch.Generator().manual_seed(5)
    count = 5 * BATCH
    data = (
        torch.randn(count, 6, generator=made), torch.randn(count, 4, generator=made),
        torch.rand(count, 1, generator=made),
    )  # fmt: skip
    return Job(
        model=Gan, data=data, batch=BATCH, steps=STEPS, seed=6, average=Average(decay=0.5),
        objectives=[
            Objective(
                name="critic", objective=critic_loss, trains="critic", repeat=3, clip_value=0.5,
                optimizer={
                    "critic.0": lambda ps: torch.optim.Adam(ps, lr=0.02, betas=(0.0, 0.9)),
                    "*": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
                },
                schedule=lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
            ),
            Objective(
                name="generator", objective=generator_loss, trains="generator.*", clip_norm=0.1, same_draw=same_draw,
                optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.05), schedule=lambda step: 0.05 / (1 + step),
            ),
        ],
    )  # fmt: skip


@cache
def plain_gan(same_draw: bool = False) -> Plain:
    plain = Plain()
    model, batch = fresh(gan())
    assert isinstance(model, Gan)
    adam = torch.optim.Adam(model.critic[0].parameters(), lr=0.02, betas=(0.0, 0.9))
    rmsprop = torch.optim.RMSprop(model.critic[2].parameters(), lr=0.01)
    halved = [StepLR(adam, 2, gamma=0.5), StepLR(rmsprop, 2, gamma=0.5)]
    adamw = torch.optim.AdamW(model.generator.parameters(), lr=0.05)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        model.zero_grad()
        own = batch(3 * (step // 4) + min(step % 4, 2) if same_draw else step)
        if step % 4 < 3:
            loss = critic_loss(model, own)
            loss.backward()
            nn.utils.clip_grad_value_(model.critic.parameters(), 0.5)
            note(plain, model, loss)
            adam.step()
            rmsprop.step()
            for scheduler in halved:
                scheduler.step()
        else:
            total, weight = generator_loss(model, own)
            loss = total / weight
            loss.backward()
            for parameter in model.critic.parameters():
                parameter.grad = None
            nn.utils.clip_grad_norm_(model.generator.parameters(), 0.1)
            note(plain, model, loss)
            adamw.param_groups[0]["lr"] = 0.05 / (1 + step // 4)
            adamw.step()
        ema.update_parameters(model)
    plain.average = {name: tensor.detach().clone() for name, tensor in ema.module.state_dict().items()}
    return finish(plain, model, adam, rmsprop, adamw)


@pytest.mark.parametrize("plan", ALLOWED)
def test_a_critic_and_a_generator_take_turns(plan: str) -> None:
    wanted = plain_gan()
    last = assert_equals(gan(), wanted, plan, PLANS[plan], ALLOWED[plan])
    buffers = {name: tensor for name, tensor in wanted.average.items() if name in last.buffers}
    assert_close(last.buffers, buffers, "running statistics, which an average without `buffers` copies")


@pytest.mark.parametrize("plan", ["single", "ddp"])
def test_a_generator_has_the_batch_that_the_critic_had_last(plan: str) -> None:
    """Saved between the two, and gone on with under another plan; an epoch has five batches."""
    wanted = plain_gan(same_draw=True)
    assert wanted.losses[3] != plain_gan().losses[3]
    assert_equals(gan(same_draw=True), wanted, plan, PLANS[plan], {"single": "ddp", "ddp": "zero3"}[plan])


def test_an_objective_that_cannot_be_captured_takes_its_turn_eagerly() -> None:
    def branching(model: Gan, batch: list[Tensor]) -> tuple[Tensor, int]:
        return generator_loss(model, batch) if float(batch[0].sum()) < 1e9 else (batch[0].sum(), 1)

    job = gan()
    eager = replace(job, objectives=[job.objectives[0], replace(job.objectives[1], objective=branching)])
    assert_equals(eager, plain_gan(), "single", {}, "single")
    with pytest.raises(PlanError, match=r"cuts parameters by what each of several objectives trains"):
        ranks_of(eager, "zero3", {"data": 2})


@pytest.mark.parametrize(
    ("plan", "mesh", "told"),
    [
        ("1f1b", {"pipe": 2}, "a pipeline is cut between the ops of one step"),
        ("server-sync", {"data": 2}, "push to servers that know the gradients of one objective"),
        ("local-sgd", {"data": 2}, "mix weights between them"),
    ],
)
def test_plans_in_which_turns_mean_nothing_are_refused(plan: str, mesh: dict[str, int], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        ranks_of(gan(), plan, mesh)


def test_what_contradicts_several_objectives_is_told() -> None:
    critic, generator = gan().objectives
    with pytest.raises(JobError, match="both objectives and optimizer are given"):
        replace(gan(), optimizer=torch.optim.SGD)
    with pytest.raises(JobError, match="evaluated without metrics"):
        replace(gan(), evaluate=gan().data)
    with pytest.raises(JobError, match="critic is the first, and there is no draw before it"):
        replace(gan(), objectives=[replace(critic, same_draw=True), generator])
    with pytest.raises(JobError, match="objectives are called"):
        replace(gan(), objectives=[critic, critic])
    with pytest.raises(JobError, match="two optimizers, 'critic' and 'generator', update critic"):
        ranks_of(replace(gan(), objectives=[critic, replace(generator, trains="*")]), "single", {})
    with pytest.raises(JobError, match="trains: no parameter is called 'criticc'"):
        ranks_of(replace(gan(), objectives=[replace(critic, trains="criticc"), generator]), "single", {})
    with pytest.raises(JobError, match=r"take one of them: job.only\('critic'\)"):
        gan().objective_of(Gan(), None)
    assert gan().only("generator").trains == "generator.*"


def test_one_objective_may_train_a_part_of_the_model() -> None:
    job = gan().only("generator")
    ranks = ranks_of(job, "ddp", {"data": 2})
    before = {name: weight.clone() for name, weight in ranks.weights().items()}
    ranks.run(0)
    moved = {name for name, weight in ranks.weights().items() if not torch.equal(weight, before[name])}
    assert moved and all(name.startswith("generator.") for name in moved)


def test_verify_compares_every_objective_with_the_users_loop() -> None:
    proof = verify(gan(), "ddp", 2, steps=1, serial=True)
    assert proof.steps == 4  # a whole round
    assert proof.first is None and proof.eager and proof.eager_first is None, (proof.first, proof.eager_first)


def test_verify_sees_what_one_objective_alone_gets_wrong() -> None:
    def halved(parts: Sequence[Tensor]) -> Tensor:
        summed = add_up(parts)
        return (
            summed * 0.5 if summed.numel() > 100 else summed
        )  # gradients of the generator are the largest bucket

    proof = verify(gan(), "ddp", 2, serial=True, reduce=halved)
    assert proof.first is not None and proof.first.name.endswith("step 4"), (
        proof.first
    )  # the generator's turn
