"""A loop of the user's own on two ranks against the same loop in plain PyTorch: the same weights, bit for rounding."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait.errors import UsageError

pytestmark = pytest.mark.timeout(120)

NUM = 23
"""Samples: with batches of 6 on two ranks, the last have 3 and 2; of 11, 1 and 0."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (NUM,), generator=generator)
    y[[0, 1, 2, 7, 13]] = -100  # shares of one size weigh differently
    return TensorDataset(x, y)


def net(norm: bool) -> nn.Module:
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def own_loop(
    prepare: Any, *, batch: int, norm: bool, accumulate: int = 1, penalty: float = 0.0
) -> dict[str, Any]:
    """As a tutorial would write it; `prepare` is all that differs."""
    model = net(norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader = DataLoader(data(), batch_size=batch)
    model, optimizer, loader, scheduler = prepare(model, optimizer, loader, scheduler)
    norms = []
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(loader):
            syncs = (number + 1) % accumulate == 0 or number + 1 == len(loader)
            quiet = None if syncs or not hasattr(model, "no_sync") else model.no_sync()
            with quiet or torch.enable_grad():
                loss = F.cross_entropy(model(x), y) / accumulate
                loss = loss + penalty * sum(p.pow(2).sum() for p in model.parameters())
                loss.backward()
            if syncs:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen = float(model(data().tensors[0]).sum())
    weights = {name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()}
    return {"weights": weights, "norms": norms, "seen": seen}


CASES = [
    {"batch": 6, "norm": False},
    {"batch": 6, "norm": True},
    {"batch": 11, "norm": False, "penalty": 0.01},
    {"batch": 6, "norm": True, "accumulate": 3},
]


def loops() -> list[Any]:
    return [own_loop(plait.prepare, **case) for case in CASES]  # type: ignore[arg-type]


def two_models() -> list[float]:
    """A GAN's loop: one model's pass must not hide the other's; gradients add up over passes without no_sync."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    if torch.distributed.is_initialized():
        first, second = plait.wrap(first), plait.wrap(second)  # type: ignore[assignment]
    noise = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    mine = (
        noise[:3] if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0 else noise[3:]
    )
    given = mine if torch.distributed.is_initialized() else noise
    fake = first(given)
    second(fake.detach()).pow(2).mean().backward()
    second(fake).mean().backward()
    parameters = [*first.parameters(), *second.parameters()]
    return [number for p in parameters if p.grad is not None for number in p.grad.flatten().tolist()]


def both() -> list[Any]:
    return [loops(), two_models()]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)


def test_the_same_loop_gives_the_same_weights() -> None:
    plain = [own_loop(lambda *parts: parts, **case) for case in CASES]  # type: ignore[arg-type]
    gan = two_models()
    for cases, pair in plait.launch(both, 2):
        close(pair, gan)
        for found, expected in zip(cases, plain, strict=True):
            close(found["norms"], expected["norms"])
            close(found["seen"], expected["seen"])
            for name, value in expected["weights"].items():
                close(found["weights"][name], value)


def test_alone_nothing_is_changed() -> None:
    model = plait.wrap(net(False))
    assert model.append is not None and next(iter(model.state_dict())) == "module.0.weight"
    assert plait.wrap(model) is model
    loader = plait.prepare(DataLoader(data(), batch_size=6))
    assert [len(x) for x, _ in loader] == [6, 6, 6, 5] and len(loader) == 4


def test_what_a_loop_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError, match="of one model and one optimizer; 1 and 0 were given"):
        plait.prepare(net(False), plan="zero3")
    with pytest.raises(UsageError, match="cannot be prepared"):
        plait.prepare(3)
    with pytest.raises(UsageError, match="no trainable parameter"):
        plait.wrap(nn.ReLU())
