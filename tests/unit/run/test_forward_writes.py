"""Parameters that the forward writes into, and checks of values: as in a plain PyTorch loop, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import PlanError, StepError
from plait.graph.from_job import Captures
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially

STEPS, BATCH = 3, 6
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 8, generator=_GENERATOR)
Y = torch.randint(0, 3, (12,), generator=_GENERATOR)
WORDS = torch.randint(0, 11, (12, 5), generator=_GENERATOR)


def _mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs))


class _Follower(nn.Module):
    """A student and a teacher that follows it: MoCo's, BYOL's, a mean teacher's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.student, self.teacher = how, _mlp(), _mlp()
        if how != "trainable":
            self.teacher.requires_grad_(False)
        self.average = torch.optim.swa_utils.AveragedModel(self.student) if how == "averaged" else None

    @torch.no_grad()
    def follow(self) -> None:
        if self.average is not None:
            self.average.update_parameters(self.student)
            return
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.how == "data":
                own.data = own.data * 0.9 + other.data * 0.1
            elif self.how == "data in place":
                own.data.mul_(0.9).add_(other.data, alpha=0.1)
            else:
                own.copy_(own * 0.9 + other * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            target = (self.average or self.teacher)(x.flip(1)).softmax(-1)
        return self.student(x) + target


class _Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class _Words(nn.Module):
    """Rows of the table that a batch reads are scaled to a norm: what is written depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, 4, max_norm=1.0), nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words).mean(1))


class _WritesItsInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x[x > 1] = 1.0
        return super().forward(x.div_(2))


def _job(model: Callable[[], nn.Module], inputs: Tensor = X, **fields: Any) -> Job:
    data = [(inputs[i], Y[i]) for i in range(len(inputs))]
    given: dict[str, Any] = {"loss": nn.CrossEntropyLoss()} if "objective" not in fields else {}
    return Job(
        model=model,
        data=data,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=BATCH,
        steps=STEPS,
        **given,
        **fields,
    )


def _plain(job: Job) -> tuple[list[float], nn.Module]:
    """The loop that the user would write."""
    model = job.build_model().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    source = open_data(job.data, job.collate)
    order = job.order(source.num_samples)
    assert order is not None
    losses = []
    for step in range(STEPS):
        batch = source.fetch(order.at(step).ids)
        optimizer.zero_grad()
        loss = job.objective_of(model, batch)
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def _check(job: Job, plan: str, ranks: int, captures: Captures | None = None) -> None:
    losses, model = _plain(job)
    record = run_serially(job, resolve(plan, ranks), STEPS, torch.float32, captures=captures)
    torch.testing.assert_close(torch.tensor(record.losses), torch.tensor(losses), rtol=2e-5, atol=2e-5)
    found = record.weights | record.buffers
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        torch.testing.assert_close(
            found[name].detach().view_as(tensor), tensor.detach(), rtol=2e-5, atol=2e-5
        )


WRITERS: dict[str, Callable[[], Job]] = {
    "data": lambda: _job(lambda: _Follower("data")),
    "data in place": lambda: _job(lambda: _Follower("data in place")),
    "copied": lambda: _job(lambda: _Follower("copied")),
    "trainable": lambda: _job(lambda: _Follower("trainable")),
    "averaged": lambda: _job(lambda: _Follower("averaged")),
    "clamped": lambda: _job(lambda: _Clamped(8, 3)),
    "max_norm": lambda: _job(_Words, WORDS),
    "input": lambda: _job(lambda: _WritesItsInput(8, 3)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_the_forward_writes_is_there_in_the_next_step(name: str) -> None:
    job = WRITERS[name]()
    captures = Captures(job)
    _check(job, "single", 1, captures)
    _check(job, "ddp", 2, captures)


def test_every_micro_batch_writes() -> None:
    job = WRITERS["data"]()
    whole = run_serially(copy.copy(job), resolve("single", 1), STEPS, torch.float64)
    halves = _job(lambda: _Follower("data"), accumulate=2)
    ranks = run_serially(halves, resolve("ddp", 2), STEPS, torch.float64)
    alone = run_serially(halves, resolve("single", 1), STEPS, torch.float64)
    assert ranks.losses == pytest.approx(alone.losses, rel=1e-12)
    assert ranks.losses != pytest.approx(whole.losses, rel=1e-6)  # the teacher follows twice a step


@pytest.mark.parametrize(("plan", "ranks"), [("zero1", 2), ("zero3", 2), ("1f1b", 2), ("server-sync", 3)])
def test_plans_that_cut_what_is_written_are_refused(plan: str, ranks: int) -> None:
    with pytest.raises(PlanError, match=r"writes into parameters, teacher.0.weight, .* under plan"):
        run_serially(WRITERS["copied"](), resolve(plan, ranks), 1, torch.float32)


def test_run_eagerly_on_several_ranks_it_is_refused() -> None:
    def reads_values(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        chosen = batch[1] > 0
        return F.cross_entropy(model(batch[0])[chosen], batch[1][chosen])

    job = _job(lambda: _Clamped(8, 3), objective=reads_values)
    _check(job, "single", 1)
    with pytest.raises(PlanError, match="writes into a parameter, weight; .* its own share"):
        run_serially(job, resolve("ddp", 2), 1, torch.float32)


def _normal(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0])
    near = torch.distributions.Normal(found[:, :3], F.softplus(found[:, 3:]))
    prior = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    return torch.distributions.kl_divergence(near, prior).mean() - near.log_prob(batch[0][:, :3]).mean()


def _policy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    chosen = torch.distributions.Categorical(logits=model(batch[0])[:, :3])
    advantage = (batch[0][:, 0] - batch[0][:, 0].mean()) / (batch[0][:, 0].std() + 1e-8)
    return -(chosen.log_prob(batch[1]) * advantage).mean() - 0.01 * chosen.entropy().mean()


def _compares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0])[:, :3]
    if torch.equal(batch[0], batch[0] * 2):
        found = found * 0
    if torch.allclose(found, found.detach()):
        found = found * 2
    if torch.isnan(found).any():
        raise ValueError("nan")
    return F.cross_entropy(found, batch[1])


def _decorrelates(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0])[:, :3]
    off = torch.cov(found.T) - torch.diag(torch.cov(found.T).diag())
    return off.square().sum() + (torch.corrcoef(found.T) - torch.eye(3)).square().sum()


@pytest.mark.parametrize("objective", [_normal, _policy, _compares, _decorrelates])
def test_checks_of_values_are_captured(objective: Callable[..., Tensor]) -> None:
    job = _job(lambda: _mlp(6), objective=objective)
    captures = Captures(job)
    _check(job, "ddp", 2, captures)
    _check(job, "1f1b", 2, captures)


def test_a_check_that_fails_is_told_as_the_library_says_it() -> None:
    def scaled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = model(batch[0])
        # Asked for by name: torch turns the default off for the whole process at its first torch.compile.
        given = torch.distributions.Normal(found[:, :3], found[:, 3:], validate_args=True)
        return -given.log_prob(batch[0][:, :3]).mean()

    with pytest.raises(StepError, match=r"Expected parameter scale .* GreaterThan"):
        run_serially(_job(lambda: _mlp(6), objective=scaled), resolve("single", 1), 1, torch.float32)


def _chooses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0])
    picked = torch.multinomial(found.detach()[:, 3:].softmax(-1), 1)
    return F.cross_entropy(found[:, :3] * F.gumbel_softmax(found[:, 3:]), batch[1]) + picked.float().mean()


def test_choices_by_chance_are_those_of_the_samples() -> None:
    job = _job(lambda: _mlp(6), objective=_chooses)
    captures = Captures(job)
    alone = run_serially(job, resolve("single", 1), STEPS, torch.float32, captures=captures)
    for plan in ("ddp", "1f1b"):
        ranks = run_serially(job, resolve(plan, 2), STEPS, torch.float32, captures=captures)
        assert ranks.losses == pytest.approx(alone.losses, rel=1e-5)
    eager = run_eager(job, STEPS, torch.float32, captures)  # the user's own code draws the same numbers
    assert eager.losses == pytest.approx(alone.losses, rel=1e-5)


class _Quantized(nn.Module):
    """Quantization-aware training: buffers that are written or not, by the values in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.rounded = torch.ao.quantization.FakeQuantize(
            observer=torch.ao.quantization.MovingAverageMinMaxObserver
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rounded(self.first(x)))


@pytest.mark.parametrize(("plan", "ranks"), [("ddp", 2), ("server-sync", 3)])
def test_fake_quantization(plan: str, ranks: int) -> None:
    _check(_job(_Quantized), plan, ranks)


def _by_channel() -> nn.Module:
    """torch.ao's own way: an observer of each row of the weights, which has no shape before its first step."""
    quantization = torch.ao.quantization
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
def test_fake_quantization_by_channel() -> None:
    job = _job(_by_channel)
    unsized, sized = _by_channel(), job.build_model()
    unsized.load_state_dict(dict(sized.named_parameters()), strict=False)
    assert sized.get_buffer("0.weight_fake_quant.scale").shape == (6,)
    for _ in range(2):
        torch.testing.assert_close(sized(X), unsized(X), rtol=0, atol=0)
    torch.testing.assert_close(sized.state_dict(), unsized.state_dict(), rtol=0, atol=0)
    _check(job, "ddp", 2)


class _Centered(nn.Module):
    """Its buffer follows a mean over the whole batch, of which every rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x).tanh()
        output: Tensor = self.last(found - self.center)
        with torch.no_grad():
            self.center.mul_(0.9).add_(found.mean(0), alpha=0.1)
        return output


@pytest.mark.parametrize(("plan", "ranks"), [("ddp", 4), ("megatron", 2)])
def test_a_mean_of_the_whole_batch(plan: str, ranks: int) -> None:
    _check(_job(_Centered), plan, ranks)


def test_counters_of_a_model_that_runs_eagerly_under_servers() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x[x[:, 0] < 9])  # a shape that depends on values

    _check(_job(Counts), "server-sync", 3)
