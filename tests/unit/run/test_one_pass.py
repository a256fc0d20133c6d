"""Adam's step in one pass: whom it takes, and what it hands to the kernel (the kernel itself: tests/gpu)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from plait.job.precision import MASTER, keep_masters
from plait.run.hold import one_pass
from plait.run.hold.one_pass import Entry, OnePass


def _made(kind: Any = torch.optim.AdamW, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """An optimizer that made a step, and has new gradients."""
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in (3, 1500)]
    optimizer = kind([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.1, **options)
    if dtype != torch.float32:
        keep_masters(optimizer)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    return optimizer


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def test_leaves_processors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "_kernels", lambda: pytest.fail("asked for a kernel"))
    optimizer = _made(dtype=torch.bfloat16)
    with OnePass().made(optimizer):
        assert all(parameter.grad is not None for parameter in _parameters(optimizer))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the kernel would be called with, for tensors of a processor."""
    seen: list[tuple[Any, ...]] = []
    kernels = SimpleNamespace(BLOCK=1024, update=lambda *args, **kwargs: seen.append((*args, kwargs)))
    monkeypatch.setattr(one_pass, "_kernels", lambda: kernels)
    monkeypatch.setattr(one_pass, "_FEW", 0)
    monkeypatch.setattr(one_pass, "_is_here", lambda parameter: True)
    monkeypatch.setattr(one_pass, "_moved", lambda tensor, device: tensor.to(device))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hands_over_addresses_options_and_corrections(
    dtype: torch.dtype, calls: list[tuple[Any, ...]]
) -> None:
    optimizer = _made(dtype=dtype, weight_decay=0.25, betas=(0.5, 0.75))
    own = OnePass()
    before = [parameter.grad for parameter in _parameters(optimizer)]
    versions = [parameter._version for parameter in _parameters(optimizer)]
    with own.made(optimizer):
        assert all(parameter.grad is None for parameter in _parameters(optimizer))
    assert all(p.grad is gradient for p, gradient in zip(_parameters(optimizer), before, strict=True))
    assert all(p._version > version for p, version in zip(_parameters(optimizer), versions, strict=True))
    assert len(calls) == 2  # one for each group
    table, blocks, corrections, count, options, gradient, short, flags = calls[1]
    parameter = _parameters(optimizer)[1]
    state = optimizer.state[parameter]
    weight = parameter if dtype == torch.float32 else state[MASTER]
    assert parameter.grad is not None
    tensors = (parameter.grad, weight, state["exp_avg"], state["exp_avg_sq"], parameter)
    assert table.tolist() == [[1500, *(tensor.data_ptr() for tensor in tensors)]]
    assert blocks.tolist() == [[0, 0], [0, 1]] and count == 2
    assert int(state["step"]) == 2
    assert corrections.tolist() == [[0.75, pytest.approx(0.4375**0.5)]]
    assert options == (0.1, 0.5, 0.75, 1e-8, 0.25)
    assert (gradient, short) == (dtype, None if dtype == torch.float32 else dtype)
    assert flags["decoupled"] and not flags["negated"]
    with own.made(optimizer):
        pass
    assert calls[3][0] is table and calls[3][1] is blocks  # nothing moved, nothing is sent again


def test_adam_decays_through_gradients(calls: list[tuple[Any, ...]]) -> None:
    with OnePass().made(_made(torch.optim.Adam, maximize=True, decoupled_weight_decay=False)):
        pass
    assert not calls[0][-1]["decoupled"] and calls[0][-1]["negated"]


class Other(torch.optim.AdamW):
    """Somebody's own optimizer, which may do anything."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": False}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {}),
        (Other, {}),
    ],
)
def test_leaves_what_it_does_not_know_to_torch(
    kind: Any, options: dict[str, Any], calls: list[tuple[Any, ...]]
) -> None:
    made = dict(options)
    rate = made.pop("lr", None)
    optimizer = _made(kind, **made)
    for group in optimizer.param_groups if rate is not None else ():
        group["lr"] = rate
    with OnePass().made(optimizer):
        assert all(parameter.grad is not None for parameter in _parameters(optimizer))
    assert not calls


def test_leaves_first_steps_and_watched_optimizers_to_torch(calls: list[tuple[Any, ...]]) -> None:
    optimizer = _made()
    optimizer.state.pop(_parameters(optimizer)[0])
    with OnePass().made(optimizer):
        assert [parameter.grad is None for parameter in _parameters(optimizer)] == [False, True]
    optimizer.register_step_post_hook(lambda *_: None)
    with OnePass().made(optimizer):
        assert all(parameter.grad is not None for parameter in _parameters(optimizer))
    assert len(calls) == 1


def test_wants_tensors_that_lie_alike() -> None:
    def entry(**changes: torch.Tensor) -> Entry:
        own = nn.Parameter(torch.ones(4, 4))
        tensors = {name: torch.ones(4, 4) for name in ("gradient", "mean", "square")} | {
            "weight": own.detach()
        }
        return Entry(**({"parameter": own, "step": torch.ones(())} | tensors | changes))  # type: ignore[arg-type]

    assert entry().lies_alike()
    assert not entry(mean=torch.ones(4, 4).t().contiguous().t()).lies_alike()
    assert not entry(square=torch.ones(4, 4).double()).lies_alike()
    assert not entry(gradient=torch.ones(17)[1:].view(4, 4)).lies_alike()  # not at a multiple of 16 bytes
    assert not entry(gradient=torch.ones(4, 4).to_sparse()).lies_alike()
    assert not entry(parameter=nn.Parameter(torch.ones(4, 8)[:, ::2])).lies_alike()
