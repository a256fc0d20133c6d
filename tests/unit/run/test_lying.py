"""Gradients lie as their parameters do, in whatever order of dims a graph made them: fused kernels rely on it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.job.job import Job
from plait.run.hold.lying import lying_as
from plait.run.verify import verify


class Experts(nn.Module):
    """The gradient of `inner` is a product whose dims are in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Parameter(0.3 * torch.randn(2, *shape)) for shape in ((6, 8), (8, 4)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bd,edh->ebh", x, self.inner).tanh()
        return torch.einsum("ebh,eho->ebo", hidden, self.outer).mean(0)


def images() -> nn.Module:
    made = nn.Sequential(nn.Conv2d(6, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(36, 4))
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Flat(torch.optim.Optimizer):
    """Goes through memory."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            weight, gradient = (t.as_strided((t.numel(),), (1,)) for t in (parameter, parameter.grad))
            weight.sub_(gradient.sign(), alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "flat": Flat,
}


def job(kind: str, optimizer: str) -> Job:
    shape = (8, 6) if kind == "experts" else (8, 6, 3, 3)
    return Job(
        model=Experts if kind == "experts" else images, data=(torch.randn(shape), torch.randint(0, 4, (8,))), batch=8,
        steps=2, loss=nn.CrossEntropyLoss(), optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["experts", "images"])
@pytest.mark.parametrize("plan", ["single", "ddp", "1f1b"])
def test_kernels_that_go_through_memory_equal_the_users_loop(kind: str, optimizer: str, plan: str) -> None:
    outcome = verify(job(kind, optimizer), plan, 1 if plan == "single" else 2, steps=2, serial=True)
    assert outcome.ok and outcome.eager, (outcome.first, outcome.eager_first)


@pytest.mark.parametrize("offload", ["gradients", "optimizer"])
def test_on_the_host_too(offload: str) -> None:
    settings = {"memory": {"offload": [offload]}}
    outcome = verify(job("experts", "fused AdamW"), "1f1b", 2, steps=2, serial=True, settings=settings)
    assert outcome.ok, outcome.first


def test_only_what_lies_otherwise_is_copied() -> None:
    gradient = torch.randn(3, 4).bfloat16()
    assert lying_as(gradient, torch.empty(3, 4)) is gradient
    assert lying_as(gradient[:, :1].as_strided((3, 1), (4, 7)), torch.empty(3, 2)[:, :1]) is not None
    turned = lying_as(gradient, torch.empty(4, 3).t())
    assert turned.stride() == (1, 3) and turned.dtype == gradient.dtype and torch.equal(turned, gradient)
    sparse = gradient.float().to_sparse()
    assert lying_as(sparse, torch.empty(4, 3).t()) is sparse
