"""Convolutions with their channels last in memory: the same numbers, and what follows keeps the layout."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import ZOO
from torch import nn

import plait
from plait.errors import PlanError
from plait.graph.from_job import Captures
from plait.plan.named import resolve
from plait.program.cost.layouts import prefers_channels_last
from plait.run.parallelize import parallelize


@pytest.mark.parametrize("name", ["resnet_bn", "unet"])
def test_equals_the_layout_of_the_model(name: str) -> None:
    job = ZOO[name].job(6, 1, optimizer="sgd", num_samples=24)
    last, plain = (
        parallelize(job, "single", settings={"layout": layout}) for layout in ("channels-last", "as-is")
    )
    for number in range(3):
        batch = plain._programs.captures.source.fetch(torch.arange(6) + 6 * number)
        assert last(batch) == pytest.approx(plain(batch), rel=1e-5)
    weights = [p for p in last.model.parameters() if p.ndim == 4]
    assert weights
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    for left, right in zip(last.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    saved = last.checkpoint().parameters
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: p.shape for name, p in plain.model.named_parameters()
    }


def test_auto_asks_how_much_of_the_work_is_convolutions() -> None:
    cuda = torch.device("cuda")
    for name, expected in (("resnet_bn", True), ("gpt", False)):
        step = parallelize(ZOO[name].job(6, 1), "single")
        plan, program = resolve("single", 1), step._programs.full_step()
        assert prefers_channels_last(plan, program, cuda) is expected
        assert not prefers_channels_last(plan, program, torch.device("cpu"))
    with pytest.raises(PlanError, match="layout='rows'"):
        resolve("single", 1, {"layout": "rows"})


class PooledResidual(nn.Module):
    """As ConvNeXt ends: channels last by a permutation, a residual, the mean of every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 10)
        self.pool, self.norm = nn.AdaptiveAvgPool2d(1), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        pooled: torch.Tensor = self.head(self.norm(self.pool(x).permute(0, 2, 3, 1)).flatten(1))
        return pooled


def test_what_a_pool_lays_out_keeps_its_samples() -> None:
    data = [(torch.randn(3, 8, 8), i % 10) for i in range(8)]
    job = plait.Job(
        model=PooledResidual, data=data, loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), batch=4,
    )  # fmt: skip
    graph = Captures(job, None, torch.float64).of_size(4)
    assert not any("as_strided" in str(node.target) for node in graph.graph.nodes)
    assert plait.verify(job, "ddp", 2, steps=2, serial=True).ok
