"""A loop's own random numbers are those that it has without plait, whatever a plan compiles and draws."""

import random

import pytest
import torch
from torch import Tensor, nn

import plait

pytestmark = pytest.mark.timeout(60)


class Drops(nn.Module):
    """Draws; where it keeps state in Python, it runs eagerly."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.counts, self.seen = nn.Linear(4, 4), nn.Dropout(0.5), counts, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.counts
        return self.drop(self.linear(x)) * (1 + self.seen % 2)


@pytest.mark.parametrize("counts", [False, True])
def test_what_the_loop_draws_is_its_own(counts: bool) -> None:
    model = Drops(counts)
    prepared, optimizer = plait.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="single")
    torch.manual_seed(3)
    random.seed(3)
    drawn = []
    for _ in range(3):
        x = torch.randn(2, 4)
        prepared(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        drawn += [x.sum().item(), random.random()]
    torch.manual_seed(3)
    random.seed(3)
    assert drawn == [number for _ in range(3) for number in (torch.randn(2, 4).sum().item(), random.random())]
