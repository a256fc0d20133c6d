"""Convolutions with their channels last in memory: the same numbers, and what follows keeps the layout."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import ZOO
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

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


def of_images(model: Callable[[], nn.Module]) -> plait.Job:
    data = [(torch.randn(3, 8, 8), i % 10) for i in range(8)]
    return plait.Job(
        model=model, data=data, loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), batch=4,
    )  # fmt: skip


def test_what_a_pool_lays_out_keeps_its_samples() -> None:
    job = of_images(PooledResidual)
    graph = Captures(job, None, torch.float64).of_size(4)
    assert not any("as_strided" in str(node.target) for node in graph.graph.nodes)
    assert plait.verify(job, "ddp", 2, steps=2, serial=True).ok


class NormedBetween(nn.Module):
    """A group norm whose gradient comes out of a sum over ranks, with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 2, 2), nn.GroupNorm(1, 8), nn.Linear(8, 10)
        self.wide, self.narrow = nn.Conv2d(8, 32, 1), nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        x = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        found: torch.Tensor = self.head(x.mean((2, 3)))
        return found


def test_gradients_of_group_norm_lie_as_its_input() -> None:
    assert plait.verify(of_images(NormedBetween), "megatron", 2, steps=2, serial=True).ok


def test_weight_norm_of_weights_with_channels_last() -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            weight_norm(nn.Conv2d(3, 8, 3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
        )

    job = of_images(model)
    last, plain = (
        parallelize(job, "single", settings={"layout": layout}) for layout in ("channels-last", "as-is")
    )
    batch = plain._programs.captures.source.fetch(torch.arange(4))
    for _ in range(2):
        assert last(batch) == pytest.approx(plain(batch), rel=1e-5)
    for left, right in zip(last.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
