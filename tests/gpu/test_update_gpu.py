"""Adam's step in one pass on a GPU: against torch's own, with all options, of float32 and of 16-bit weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.job.precision import MASTER, keep_masters
from plait.run.hold import one_pass
from plait.run.hold.one_pass import OnePass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]
SHAPES = ((3,), (1024,), (64, 129), (5, 4, 3, 3), (1,))
"""Less than a block, a whole one, several and a rest."""


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "_FEW", 0)


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    g = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in SHAPES]
    made[3] = made[3].to(memory_format=torch.channels_last)
    return [nn.Parameter(tensor) for tensor in made]


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 0.02, "weight_decay": 0.0}, {"params": parameters[2:]}]


def _pairs(kind: Any, dtype: torch.dtype, **options: Any) -> tuple[list[Any], list[Any]]:
    """(parameters, optimizer) of ours and of torch's, which has float32 weights in any case."""
    ours = _parameters(dtype)
    theirs = [nn.Parameter(p.detach().float().clone()) for p in ours]  # of float32 too
    return (
        [ours, kind(_groups(ours), lr=0.01, weight_decay=0.1, **options)],
        [theirs, kind(_groups(theirs), lr=0.01, weight_decay=0.1, **options)],
    )


def _train(ours: list[Any], theirs: list[Any], steps: int = 6) -> int:
    """Step both with the same gradients; returns how many tensors were updated in one pass."""
    made, count = OnePass(), 0
    (own, optimizer), (plain, reference) = ours, theirs
    for step in range(steps):
        g = torch.Generator("cuda").manual_seed(step)
        for mine, other in zip(own, plain, strict=True):
            mine.grad = torch.empty_like(mine).copy_(torch.randn(mine.shape, generator=g, device="cuda"))
            other.grad = mine.grad.float()
        if step == 3:  # a parameter that a step did not use
            own[0].grad = plain[0].grad = None
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] *= 0.9
        before = [p.grad for p in own]
        with made.made(optimizer):
            count += sum(p.grad is None for p, grad in zip(own, before, strict=True) if grad is not None)
            optimizer.step()
        assert all(p.grad is grad for p, grad in zip(own, before, strict=True))
        reference.step()
    return count


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"maximize": True}, {"betas": (0.5, 0.7), "eps": 1e-3}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = _pairs(kind, dtype, **options)
    if dtype != torch.float32:
        keep_masters(ours[1])
    assert _train(ours, theirs) == 5 * len(SHAPES) - 1  # the first step is torch's, and one had no gradient
    for mine, other in zip(ours[0], theirs[0], strict=True):
        state, expected = ours[1].state[mine], theirs[1].state[other]
        wide = state[MASTER] if dtype != torch.float32 else mine.detach()
        assert set(state) == {*expected, *([MASTER] if dtype != torch.float32 else [])}
        torch.testing.assert_close(wide, other.detach(), rtol=1e-5, atol=1e-6)
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-7)
        assert torch.equal(mine.detach(), wide.to(dtype))
        assert mine.stride() == state["exp_avg"].stride()


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"foreach": True}, {"capturable": True}, {"fused": False}, {"fused": True}]
)
def test_leaves_other_ways_to_torch(options: dict[str, Any]) -> None:
    ours, theirs = _pairs(torch.optim.AdamW, torch.float32, **options)
    for group in (*ours[1].param_groups, *theirs[1].param_groups) if options == {"fused": True} else ():
        group["lr"] = torch.tensor(group["lr"], device="cuda")  # a number that the host does not know
    assert _train(ours, theirs, 3) == 0
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def test_leaves_an_optimizer_that_others_watch_to_torch() -> None:
    ours, theirs = _pairs(torch.optim.AdamW, torch.float32)
    seen = []
    ours[1].register_step_pre_hook(lambda *_: seen.append([p.grad is None for p in ours[0]]))
    assert _train(ours, theirs, 2) == 0
    assert seen == [[False] * len(SHAPES)] * 2
