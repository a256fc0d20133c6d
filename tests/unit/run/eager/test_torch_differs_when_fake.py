"""What fake tensors refuse or promise otherwise than real ones: captured all the same, and equal to eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.job.job import Job
from plait.run.proof.reference import reference_of
from plait.run.verify import verify

WIDTH, EXPERTS = 8, 3
"""Of the models here."""


class Experts(nn.Module):
    """Each token goes to one expert; tokens are sorted by expert, and all experts are one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        score, expert = self.router(tokens).softmax(-1).max(-1)
        chosen, order = expert.sort(stable=True)
        ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(tokens[order].contiguous(), self.up, offs=ends).relu()
        found = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        return torch.zeros_like(tokens).index_copy(0, order, found * score[order, None]).view_as(x)


class Gate(nn.Module):
    """The gradient that reaches the softplus is transposed, and a view follows it in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        gate = F.softplus(self.inner(x)).transpose(1, 2)
        return (gate * self.scale).transpose(1, 2)


class Dropped(nn.Module):
    """Layers that a number drawn in Python would skip, were the probability not 0; dropout follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.layerdrop = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.layerdrop:
                continue
            x = x + F.dropout(layer(x), 0.2)
        return x


def job_of(model: type[nn.Module]) -> Job:
    """A few sequences whose sums are classes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(10, 4, WIDTH, generator=draw)
    return Job(
        model=model,
        data=[(a, torch.randint(WIDTH, (), generator=draw)) for a in x],
        loss=lambda output, target: F.cross_entropy(output.mean(1), target),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=5,
        accumulate=2,
    )


@pytest.mark.parametrize("model", [Experts, Gate, Dropped])
def test_equal_to_eager_under_every_kind_of_plan(model: type[nn.Module]) -> None:
    reference = reference_of(job_of(model), steps=2, fp32=True)
    assert not isinstance(reference.eager, str), reference.eager
    assert all(difference.ok for difference in reference.eager)
    for plan in ("ddp", "zero3", "1f1b", *(("megatron",) if model is Experts else ())):
        assert verify(reference.job, plan, 2, serial=True, against=reference).ok, plan
    assert reference.captures.latest(2).gradients, "it is captured, not run eagerly"
