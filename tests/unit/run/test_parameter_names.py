"""Parameters may have any name, also those that plait uses for scalars of the step."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from plait.job.job import Job
from plait.run.verify import verify


class Named(nn.Module):
    """A model whose parameters are called like what a step sums beside gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.total = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5, 3))
        self.tangent = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) @ self.total + self.tangent


@pytest.mark.parametrize("model", [Named, lambda: nn.Linear(4, 3)])
@pytest.mark.parametrize("mesh", [{"data": 2}, {"pipe": 2}, {"pipe": 2, "data": 2}])
def test_a_parameter_called_weight_or_total(model: Callable[[], nn.Module], mesh: dict[str, int]) -> None:
    job = Job(
        model=model, data=(torch.randn(16, 4), torch.randint(0, 3, (16,))), loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=8, accumulate=2, steps=2,
    )  # fmt: skip
    found = verify(job, "1f1b" if "pipe" in mesh else "ddp", mesh=mesh, serial=True, steps=2)
    assert found.ok, found.first
