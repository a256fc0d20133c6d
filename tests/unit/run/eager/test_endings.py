"""Objectives whose own code needs values: what modules compute is captured, and every plan equals the user's loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.graph.from_job import Captures
from plait.plan.named import resolve
from plait.run.proof.serial_run import run_serially

STEPS, BATCH = 2, 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class Within(Net):
    """It needs values in its own forward, and uses a layer after that."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return h.new_zeros(len(x), 3).index_put((h[:, 0] > 0,), self.head(h[h[:, 0] > 0])) + h[:, :3]


class Keeps(Net):
    """It leaves something behind for the objective."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        self.penalty = h.square().mean()
        return self.head(h)


class Lists(Net):
    """It leaves one thing more behind in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        self.penalties.append(h.square().mean())
        return self.head(h)


def chosen(model: Any, batch: Any) -> Tensor:
    x, y = batch
    logits, mask = model(x), y != 1
    return F.cross_entropy(logits[mask], y[mask])


def chosen_features(model: Any, batch: Any) -> Tensor:
    x, y = batch
    h, mask = model.features(x), y != 1
    return F.cross_entropy(model.head(h[mask]), y[mask])


def of_each_class(model: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = model(x)
    means = [logits[y == label].mean(0) for label in y.unique()]
    return F.cross_entropy(logits, y) - torch.stack(means).var(0, correction=0).sum()


def together(model: Any, batch: Any) -> Tensor:
    """What samples share shows only in values that made-up numbers seldom have."""
    x, y = batch
    logits = model(x)
    far = logits[x.abs().sum(1) > 6]
    return F.cross_entropy(logits, y) + 0.01 * far.sum(0).square().sum()


def matched(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    logits = model(x)
    order = logits.detach()[:, 0].numpy().argsort().copy()
    return F.mse_loss(logits[torch.from_numpy(order)], x[:, :3])


def with_penalty(model: Any, batch: Any) -> Tensor:
    return chosen(model, batch) + model.penalty


def with_penalties(model: Any, batch: Any) -> Tensor:
    return chosen(model, batch) + model.penalties[-1]


def plain(batch: Any) -> list[Any]:
    return [torch.stack(leaves) for leaves in zip(*batch, strict=True)]


def job_of(model: Callable[[], nn.Module], **fields: Any) -> plait.Job:
    numbers = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(4, generator=numbers), torch.randint(3, (), generator=numbers)) for _ in range(2 * BATCH)
    ]
    return plait.Job(
        model=model,
        data=data,
        collate=plain,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
        batch=BATCH,
        steps=STEPS,
        **fields,
    )


def loop(job: plait.Job) -> tuple[list[float], dict[str, Tensor]]:
    model = job.build_model().double()
    optimizer = job.build_optimizer(list(model.named_parameters()))
    source = Captures(job).source
    order = job.order(source.num_samples)
    assert order is not None
    losses = []
    for step in range(STEPS):
        x, y = source.fetch(order.at(step).ids)
        optimizer.zero_grad()
        loss = job.objective_of(model, (x.double(), y))
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "chosen": ({"model": Net, "objective": chosen}, True),
    "chosen, in two": ({"model": Net, "objective": chosen, "accumulate": 2}, True),
    "layer after it": ({"model": Net, "objective": chosen_features}, True),
    "in the model": ({"model": Within, "loss": nn.CrossEntropyLoss()}, False),
    "with what the forward left": ({"model": Keeps, "objective": with_penalty}, True),
    "of each class": ({"model": Net, "objective": of_each_class}, False),
    "together": ({"model": Net, "objective": together}, False),
    "matched": ({"model": Net, "objective": matched}, False),
}
"""Jobs, and whether each rank runs the objective on its own samples."""


@pytest.mark.parametrize("name", WAYS)
def test_what_modules_compute_is_captured(name: str) -> None:
    fields, in_shares = WAYS[name]
    job = job_of(**fields)
    losses, weights = loop(job)
    captures = Captures(job, dtype=torch.float64)
    for plan, ranks in (("single", 1), ("ddp", 3), ("zero3", 2), ("1f1b", 2)):
        found = run_serially(job, resolve(plan, ranks), STEPS, torch.float64, captures=captures)
        assert found.losses == pytest.approx(losses, rel=1e-9), plan
        for own, expected in weights.items():
            torch.testing.assert_close(found.weights[own], expected.detach(), rtol=1e-9, atol=1e-12, msg=plan)
        said = "its own samples" if in_shares else "the whole micro-batch"
        assert any("runs eagerly from there on" in n and said in n for n in found.notices), found.notices


def test_a_forward_that_keeps_a_list_runs_whole() -> None:
    job = job_of(Lists, objective=with_penalties)
    losses, _ = loop(job)
    found = run_serially(job, resolve("single", 1), STEPS, torch.float64)
    assert found.losses == pytest.approx(losses, rel=1e-9)
    assert any(notice.startswith("running eagerly") for notice in found.notices)


def test_the_line_that_needs_values_is_named() -> None:
    captures = Captures(job_of(Net, objective=chosen))
    notices = captures.of_size(BATCH).notices
    assert any("test_endings.py" in notice for notice in notices), notices
