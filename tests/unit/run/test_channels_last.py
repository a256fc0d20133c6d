"""Convolutions with their channels last in memory: the same numbers, and what follows keeps the layout."""

import pytest
import torch
from tests.zoo import ZOO

from plait.errors import PlanError
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
