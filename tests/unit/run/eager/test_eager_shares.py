"""A model that cannot be captured computes on shares what one process computes on the whole batch."""

# mypy: ignore-errors

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.errors import JobError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.serial_run import Record, run_serially

SAMPLES, STEPS = 5, 2


class Opaque(nn.Module):
    """Batch norm, dropout, and a hook on a finished gradient, which no graph holds."""

    def __init__(self, drop: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.drop, self.again = drop, again
        self.embed, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=drop, batch_first=False)
        self.head = nn.Linear(6, 11)
        self.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        self.register_buffer("thirds", torch.tensor([1 / 3]))

    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(self.norm(h.transpose(1, 2)).transpose(1, 2).relu(), self.drop, self.training)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = checkpoint(self.middle, h, use_reentrant=False) if self.again else self.middle(h)
        h = self.lstm(h.transpose(0, 1))[0].transpose(0, 1)
        noise = torch.rand(h.shape[0], 1, 1) * self.drop
        return self.head(h + noise + torch.randn(6) * self.drop)


def tokens() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (15, 4), generator=generator)
    y = x.clone()
    for row in range(15):  # shares of different numbers of labels
        y[row, : row % 5] = -100
    return [(x[i], y[i]) for i in range(15)]


def mean_over_tokens(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def with_smoothing_and_penalty(model: Any, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], label_smoothing=0.1)
    return loss + 0.01 * sum(p.square().sum() for p in model.head.parameters())


def sum_by_count(model: Any, batch: Any) -> Tensor:
    x, y = batch
    each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
    return (each * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1)


def sum_by_constant(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="sum") / 7.0


def mean_of_chosen(model: Any, batch: Any) -> Tensor:
    return model(batch[0])[batch[1] >= 0].square().mean()


def job(objective: Any = mean_over_tokens, model: Any = Opaque, **fields: Any) -> Job:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    given = {"optimizer": sgd, "batch": SAMPLES, "steps": STEPS, "clip_norm": 1.0, **fields}
    return Job(model=model, data=tokens(), objective=objective, **given)


def run(made: Job, plan: str, ranks: int) -> Record:
    return run_serially(made, resolve(plan, ranks), STEPS, torch.float64)


def assert_same(found: Record, wanted: Record) -> None:
    assert any("running eagerly" in notice for notice in found.notices)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name].view_as(gradient), gradient, rtol=1e-9, atol=1e-12)
    for ours, theirs in ((found.weights, wanted.weights), (found.buffers, wanted.buffers)):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name].view_as(tensor), tensor, rtol=1e-9, atol=1e-12)


OBJECTIVES = [mean_over_tokens, with_smoothing_and_penalty, sum_by_count, sum_by_constant, mean_of_chosen]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_unequal_shares_weigh_what_the_loss_is_a_mean_of(objective: Any) -> None:
    """Five samples on two ranks, with different numbers of labels; batch norm sees all of them."""
    found = run(job(objective), "ddp", 2)
    assert not [n for n in found.notices if "counts as a mean over its samples" in n]
    assert_same(found, run(job(objective), "single", 1))


def test_one_rank_computes_what_a_plain_loop_does() -> None:
    found = run(job(clip_norm=None), "single", 1)
    torch.manual_seed(0)
    made = job(clip_norm=None)
    model = made.build_model().double()
    optimizer = made.build_optimizer(list(model.named_parameters()))
    order = made.order(15)
    losses = []
    for step in range(STEPS):
        batch = [
            torch.stack(parts) for parts in zip(*(made.data[i] for i in order.at(step).ids), strict=True)
        ]
        optimizer.zero_grad()
        loss = mean_over_tokens(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert found.losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "ranks"), [("ddp", 3), ("ddp", 5), ("zero1", 2), ("zero2", 2), ("zero3", 3)]
)
def test_every_plan_that_shares_the_batch_draws_and_sums_alike(plan: str, ranks: int) -> None:
    """Dropout, noise by sample and noise for all, with ranks that have no samples, state and parameters cut."""
    made = job(model=lambda: Opaque(drop=0.3), accumulate=2)
    assert_same(run(made, plan, ranks), run(made, "single", 1))


def test_what_is_checkpointed_draws_the_same_numbers_again() -> None:
    """Batch norm follows its batch twice there, as it does in torch: the same on all plans."""
    again = job(model=lambda: Opaque(drop=0.3, again=True))
    one = run(again, "single", 1)
    assert one.losses == pytest.approx(
        run(job(model=lambda: Opaque(drop=0.3)), "single", 1).losses, rel=1e-12
    )
    assert_same(run(again, "ddp", 2), one)


def test_a_gradient_of_a_gradient_through_shared_statistics_is_refused() -> None:
    """One process can; over ranks it would miss what others' samples do to the statistics."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(11, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
            self.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).mean(1)
            return self.head(self.norm(h).tanh()), h

    def penalty(model: Any, batch: Any) -> Tensor:
        out, h = model(batch[0])
        (slope,) = torch.autograd.grad(out.sum(), h, create_graph=True)
        return slope.square().mean()

    made = job(penalty, Small, clip_norm=None)
    run(made, "single", 1)
    with pytest.raises(JobError, match="differentiates a gradient"):
        run(made, "ddp", 2)


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("ddp", 2), ("zero1", 2), ("zero3", 2)])
def test_a_parameter_without_a_gradient_is_left_alone(plan: str, ranks: int) -> None:
    """Weight decay would shrink it. One layer is used by a marked sample alone, which one of two ranks has."""

    class Sometimes(Opaque):
        def __init__(self) -> None:
            super().__init__()
            self.never, self.rarely = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            marked = (x[:, 0] == 10)[:, None, None]
            return torch.where(marked, out * self.rarely.weight.sum(), out) if marked.any() else out

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

    data = [(x.clone().clamp(max=9), y) for x, y in tokens()]
    data[3][0][0] = 10  # of the first epoch's samples, one
    made = Job(
        model=Sometimes,
        data=data,
        objective=mean_over_tokens,
        optimizer=adamw,
        batch=SAMPLES,
        steps=3,
        clip_norm=1.0,
    )
    found = run_serially(made, resolve(plan, ranks), 3, torch.float64)
    start = made.build_model().double()
    assert torch.equal(found.weights["never.weight"], start.never.weight)
    assert torch.equal(found.weights["rarely.bias"], start.rarely.bias)
    assert not torch.equal(found.weights["rarely.weight"], start.rarely.weight)
    assert_same(found, run_serially(made, resolve("single", 1), 3, torch.float64))


def test_draws_and_statistics_that_begin_later_are_those_of_the_whole_batch() -> None:
    """Nothing is drawn and nothing normalized when the model is tried; in a part that torch.compile has made, too."""

    class Later(Opaque):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.part = torch.compile(
                nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)), backend="eager", fullgraph=True
            )

        def middle(self, h: Tensor) -> Tensor:
            self.calls += 1
            self.norm.train(self.calls > 1)
            self.part.train(self.calls > 1)
            h = self.part(self.norm(h.transpose(1, 2)).transpose(1, 2))
            out = torch.empty_like(h)
            if self.calls > 2:
                return h * torch.bernoulli(torch.full_like(h, 0.5), out=out) * torch.rand(h.shape[0], 1, 1)
            return h

    made = job(model=Later, steps=4)
    one = run_serially(made, resolve("single", 1), 4, torch.float64)
    assert_same(run_serially(made, resolve("ddp", 2), 4, torch.float64), one)
    assert made.build_model().norm.running_mean.eq(0).all() and one.buffers["norm.running_mean"].ne(0).all()


class Counting(nn.Module):
    """Runs eagerly for its counter; its first weights are of another kind than losses and counts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.eye(4, dtype=dtype))
        self.head = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head((x.to(self.first.dtype) @ self.first).abs().float())


def _by_weight(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    weights = (batch[1] + 1) * 20_011.0  # more than float16 holds, and not a number of bfloat16's
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * weights).sum(), weights.sum()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, torch.bfloat16])
def test_losses_and_weights_travel_as_they_are(dtype: torch.dtype) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    job = Job(
        model=lambda: Counting(dtype),
        data=[(x[i], i % 3) for i in range(8)],
        objective=_by_weight,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        steps=1,
    )
    one, two = (
        run_serially(job, resolve(plan, ranks), 1, torch.float32)
        for plan, ranks in (("single", 1), ("ddp", 2))
    )
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    rough = {"rtol": 2e-2, "atol": 1e-4} if dtype != torch.complex64 else {}
    torch.testing.assert_close(two.gradients[0], one.gradients[0], **rough)
