"""What a step keeps in Python is never lost: it runs eagerly and equals the plain loop, or is refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lasting import CASES
from tests.ordinary import STEPS, Base, job, mlp, numbers, vectors
from tests.unit.run.eager.test_against_eager import difference, plain_loop
from torch import Tensor, nn
from torch.ao import quantization
from torch.utils.data import DataLoader

from plait.errors import CaptureError, JobError, PlanError
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.job.model.watch import Watch
from plait.plan.named import resolve
from plait.run.proof.serial_run import Record, run_serially


def run(made: Job, plan: str = "single", ranks: int = 1) -> Record:
    return run_serially(made, resolve(plan, ranks), STEPS, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_loop_and_says_that_it_runs_eagerly(name: str) -> None:
    plain = plain_loop(CASES[name]())
    made = CASES[name]()
    record = run(made)
    assert difference(made, plain, record) is None
    assert record.notices[0].startswith("running eagerly: the forward ")


class ScaledLoss(torch.autograd.Function):
    """The last op of the step, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(output, target)
        return (output - target).square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        output, target = ctx.saved_tensors
        return 3 * grads[0] * (output - target).sign(), None


def hand_written_loss() -> Job:
    return job(
        lambda: mlp(8, 1),
        numbers(),
        objective=lambda model, batch: ScaledLoss.apply(model(batch[0]), batch[1]),
    )


class Recorded(Base):
    def middle(self, h: Tensor) -> Tensor:
        with torch.profiler.record_function("middle"):
            return h.tanh() + nn.DataParallel(nn.Sigmoid())(h)


class Scripted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(self.first)  # type: ignore[assignment]


class ChoosesByDraw(Base):
    def middle(self, h: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < 2, h.tanh(), h)


class RareWords(nn.Module):
    """Which of its layers a sample uses depends on values, which made-up numbers do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 200), nn.Linear(200, 16))
        self.words = nn.AdaptiveLogSoftmaxWithLoss(16, 12, [4, 8], div_value=2.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.words(self.first(x), y).loss


def rare_words() -> Job:
    return job(RareWords, vectors(classes=12), objective=lambda model, batch: model(*batch))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [hand_written_loss, lambda: job(Recorded), lambda: job(Scripted), lambda: job(ChoosesByDraw), rare_words],
    ids=["hand-written loss", "recorded", "scripted", "chooses by draw", "rare words"],
)
def test_is_captured_and_equals_the_plain_loop(make: Callable[[], Job]) -> None:
    made = make()
    record = run(made)
    assert difference(made, plain_loop(make()), record) is None
    assert not any("running eagerly" in notice for notice in record.notices)


def test_gradients_that_an_objective_leaves_are_refused() -> None:
    def objective(model: Any, batch: Any) -> Tensor:
        model(batch[0]).square().mean().backward()
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(JobError, match=r"calls backward\(\) itself.*0\.weight \(and 5 more\)"):
        Captures(job(mlp, objective=objective)).of_size(4)


def test_gradients_that_an_objective_clears_are_its_own() -> None:
    def objective(model: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        F.cross_entropy(model(x), batch[1]).backward()
        model.zero_grad()
        return F.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), batch[1])

    made = job(mlp, objective=objective)
    assert difference(made, plain_loop(made), run(made, "ddp", 2)) is None


def test_an_iterator_that_is_none_of_the_models_is_refused() -> None:
    loader = iter(DataLoader(torch.ones(6, 8), 2))  # type: ignore[arg-type]

    def objective(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + model(next(loader)).square().mean()

    with pytest.raises(JobError, match=r"changes objective\.loader, which is none of the model's own"):
        Captures(job(mlp, objective=objective)).of_size(4)


def test_numbers_of_the_system_are_told() -> None:
    class Surprising(Base):
        def middle(self, h: Tensor) -> Tensor:
            return h * random.SystemRandom().random()

    with pytest.raises(CaptureError, match="random numbers of the system"):
        Captures(job(Surprising)).of_size(4)


class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        self.model = quantization.prepare_qat(model.train())

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


@pytest.mark.filterwarnings("ignore")
def test_observers_that_have_no_shape_yet_are_given_theirs() -> None:
    made = job(Observed)
    assert difference(made, plain_loop(job(Observed)), run(made)) is None
    assert difference(made, plain_loop(job(Observed)), run(job(Observed), "ddp", 2)) is None


class Grows(nn.Module):
    """Keeps the largest of each column, in a buffer that has no columns before the first batch."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 3)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            if self.largest.numel() == 0:
                self.largest.resize_(x.shape[1]).zero_()
            self.largest.copy_(torch.maximum(self.largest, x.abs().amax(0)))
        return self.model(x)


def test_a_buffer_that_gets_another_shape_is_kept_or_told() -> None:
    made = job(Grows)
    assert difference(made, plain_loop(job(Grows)), run(made)) is None
    with pytest.raises(PlanError, match="another shape when it first runs; under plan ddp"):
        run(job(Grows), "ddp", 2)


def test_what_was_changed_is_put_back() -> None:
    held = {"list": [1], "numbers": random.Random(3), "tensor": torch.ones(2), "norm": nn.BatchNorm1d(2)}
    state = held["numbers"].getstate()  # type: ignore[attr-defined]
    watch = Watch({"objective": held})
    held["list"].append(2)  # type: ignore[attr-defined]
    held["numbers"].random()  # type: ignore[attr-defined]
    held["tensor"].mul_(3)  # type: ignore[attr-defined]
    held["norm"](torch.randn(4, 2))  # type: ignore[operator]
    changed = {change.path for change in watch.changes()}
    assert changed >= {
        "objective.list[1]",
        "objective.numbers",
        "objective.tensor",
        "objective.norm.running_mean",
    }
    assert watch.restore() == []
    assert held["list"] == [1] and held["numbers"].getstate() == state  # type: ignore[attr-defined]
    assert held["tensor"].tolist() == [1, 1]  # type: ignore[attr-defined]
    assert held["norm"].running_mean.tolist() == [0, 0]  # type: ignore[attr-defined]
