"""A loss of many classes without log-probabilities: found by dataflow, equal to torch's, under every plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.job.job import Job
from plait.program.local import cross_entropy
from plait.run.parallelize import Step, parallelize
from plait.run.verify import verify
from plait.torch_private.tracing import make_fx

CLASSES = 40


@pytest.fixture(autouse=True)
def _few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_FEWEST_CLASSES", CLASSES)
    monkeypatch.setattr(cross_entropy, "_CHUNK_ELEMENTS", {"cpu": 3 * CLASSES})


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(x)))


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2.0, CLASSES, dtype=output.dtype)
    return F.cross_entropy(output.flatten(0, 1).to(weight.dtype), target.flatten(), weight, ignore_index=3)


def plain(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.view(-1, CLASSES).float(), target.view(-1), ignore_index=3)


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return (losses * torch.arange(len(losses), dtype=losses.dtype)).mean()


def with_others(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A rank sums what it has of each term, and the backward divides it."""
    scores = 3 * torch.tanh(output / 3)
    of_sums = torch.logsumexp(scores, -1).square().mean()
    return F.cross_entropy(scores.flatten(0, 1), target.flatten()) + 1e-2 * of_sums


def job(loss: Any, **changes: Any) -> Job:
    tokens = torch.randint(0, CLASSES, (16, 7), generator=torch.Generator().manual_seed(0))
    return Job(
        model=Tokens, data=(tokens, tokens.roll(1, 1).contiguous()), loss=loss, batch=8, steps=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **changes,
    )  # fmt: skip


def ops_of(step: Step) -> list[Any]:
    (own,) = step._programs.full_step().classes
    return [node.target for segment in own.segments.values() for node in segment.nodes]


@pytest.mark.parametrize("loss", [weighted, plain, summed, with_others])
@pytest.mark.parametrize("plan", ["single", "ddp", "zero3", "megatron", "1f1b"])
def test_equals_one_process_and_eager(loss: Any, plan: str) -> None:
    outcome = verify(job(loss, accumulate=2), plan, 1 if plan == "single" else 2, steps=2, serial=True)
    assert outcome.ok, outcome.differences


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_wider_than_the_scores_is_left(precision: Any) -> None:
    step = parallelize(job(plain, precision=precision), "single")
    targets = ops_of(step)
    assert cross_entropy.row_losses in targets
    assert cross_entropy.row_gradients in targets
    assert not any("softmax" in str(target) or "nll_loss" in str(target) for target in targets)
    (own,) = step._programs.full_step().classes
    wide = [
        node.name
        for segment in own.segments.values()
        for node in segment.nodes
        if isinstance(value := node.meta["val"], torch.Tensor) and value.shape[-1:] == (CLASSES,)
        and value.numel() > CLASSES * 8 and value.dtype == torch.float32
    ]  # fmt: skip
    assert precision == "fp32" or not wide
    batch = tuple(tensor[:8] for tensor in step._job.data)
    losses = [step(batch) for _ in range(3)]
    model = step._job.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        with step._job.autocast("cpu"):
            expected = plain(model(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-6 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_as_a_compiler_sees_it(reduction: int) -> None:
    scores = torch.randn(9, CLASSES, dtype=torch.float64)
    labels, weight = torch.arange(9) * 4, torch.rand(CLASSES, dtype=torch.float64)
    given = (scores, labels, weight, reduction, 8)
    grad = torch.rand(9 if reduction == 0 else (), dtype=torch.float64)

    def both(scores: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Any:
        loss, total, sums = cross_entropy.row_losses(scores, labels, weight, reduction, 8, torch.float64)
        return (
            loss,
            total,
            cross_entropy.row_gradients(
                grad, scores, labels, weight, reduction, 8, total, sums, torch.float64
            ),
        )

    traced = make_fx(both, tracing_mode="fake")(scores, labels, weight, grad)
    targets = [str(node.target) for node in traced.graph.nodes]
    assert not any("scatter" in target for target in targets)  # one chunk, nothing that breaks a kernel
    for left, right in zip(
        traced(scores, labels, weight, grad), both(scores, labels, weight, grad), strict=True
    ):
        torch.testing.assert_close(left, right)
    assert torch.equal(
        torch.ops.aten.nll_loss_forward(scores.log_softmax(1), *given[1:])[1],
        both(scores, labels, weight, grad)[1],
    )


def test_what_was_made_for_log_probabilities_alone_is_erased() -> None:
    graph = make_fx(_widened)(torch.randn(6, CLASSES, dtype=torch.bfloat16), torch.arange(6)).graph
    cross_entropy.without_log_probabilities(graph)
    targets = [node.target for node in graph.nodes]
    assert cross_entropy.row_losses in targets
    assert torch.ops.aten._to_copy.default not in targets
    assert all(node.users or node.op in ("output", "placeholder") for node in graph.nodes)


def _widened(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    aten = torch.ops.aten
    rows = aten._log_softmax.default(aten._to_copy.default(scores, dtype=torch.float32), 1, False)
    loss, weight = aten.nll_loss_forward.default(rows, labels, None, 1, -100)
    one = torch.ones(())
    gradient = aten.nll_loss_backward.default(one, rows, labels, None, 1, -100, weight)
    return loss, aten._log_softmax_backward_data.default(gradient, rows, 1, torch.float32)


def test_what_others_see_stays() -> None:
    """Log-probabilities that something else reads are made as before."""

    def entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = F.log_softmax(output.flatten(0, 1), 1)
        return F.nll_loss(scores, target.flatten()) + (scores.exp() * scores).sum(1).mean()

    targets = ops_of(parallelize(replace(job(plain), loss=entropy), "single"))
    assert torch.ops.aten._log_softmax.default in targets
    assert cross_entropy.row_losses not in targets
