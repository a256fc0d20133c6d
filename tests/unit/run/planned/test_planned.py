"""A recorded loop on one rank: what a loop may write, and what it is told where it cannot be meant."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait.errors import PlanError, UsageError

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Two(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        self.width = 5

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).tanh()
        return {"hidden": hidden, "scores": self.second(hidden)}


def made(plan: str | None, trained: str = "") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Two()
    chosen = [p for name, p in model.named_parameters() if name.startswith(trained)]
    optimizer = torch.optim.AdamW(chosen, lr=0.1)
    return (model, optimizer) if plan is None else plait.prepare(model, optimizer, plan=plan)


def parts(model: Any) -> tuple[Any, Any, Any]:
    out = model(X)
    fit = F.cross_entropy(out["scores"], Y, weight=torch.tensor([1.0, 2.0, 3.0]).double())
    spread = out["hidden"].pow(2).mean()
    return fit, spread, fit + 0.1 * spread


def loop(plan: str | None, trained: str = "") -> list[Any]:
    """Looks at numbers before and after their backward; clips what the optimizer does not have as well."""
    model, optimizer = made(plan, trained)
    seen: list[Any] = []
    kept = []
    for _ in range(3):
        fit, spread, loss = parts(model)
        kept.append(loss.detach())
        seen.append(loss.item())
        loss.backward()
        seen += [spread.item(), fit.item(), f"{loss:.9f}"]
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    seen.append(float(torch.stack(kept).sum()))
    return [*seen, *(value.tolist() for value in model.state_dict().values())]


@pytest.mark.parametrize("trained", ["", "second"])
def test_what_a_loop_looks_at_is_what_it_sees_alone(trained: str) -> None:
    """Also with an optimizer of a part of the model: the other gradients count in the norm, and add up, as in torch."""
    for found, expected in zip(loop("zero3", trained), loop(None, trained), strict=True):
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Prepared, after one step."""
    model, optimizer = made("zero3")
    parts(model)[2].backward()
    optimizer.step()
    return model, optimizer


def test_wrong_uses_are_told(pair: tuple[Any, Any]) -> None:
    model, optimizer = pair
    loss = parts(model)[2]
    loss.backward()
    with pytest.raises(UsageError, match="called twice on the same loss"):
        loss.backward()
    with pytest.raises(UsageError, match="on one number; this has shape"):
        model(X)["scores"].argmax(1).tolist()
    with pytest.raises(UsageError, match="depends on values"):
        model(X)["scores"][Y > 0]
    with pytest.raises(UsageError, match="cannot be used by itself"):
        model.first(X)
    with pytest.raises(UsageError, match="gradient of first.weight cannot be told"):
        next(iter(model.parameters())).grad.mean()
    with pytest.raises(UsageError, match="needs the value of a parameter"), torch.no_grad():
        next(iter(model.parameters())).mean()
    with pytest.raises(UsageError, match="cannot be looked at without values"):
        model(X[:, :2])
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UsageError, match="two prepared models"):
        _ = parts(model)[2] + parts(made("zero3")[0])[2]
    model.first_of_all = 1
    assert model.width == 5 and sum(p.numel() for p in model.parameters()) == 43
    model.zero_grad()
    optimizer.step()  # without gradients nothing happens, as in torch


def test_what_cannot_be_prepared_is_told() -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="of one model and one optimizer; 2 and 1 were given"):
        plait.prepare(model, nn.Linear(1, 1), optimizer, plan="zero3")
    with pytest.raises(UsageError, match="4 parameters that the model does not have"):
        plait.prepare(Two(), optimizer, plan="zero3")
    with pytest.raises(PlanError, match="1 processes were started"):
        plait.prepare(model, optimizer, plan=plait.resolve("1f1b", 2))
    with pytest.raises(PlanError, match="micro_batches=2 slices"):
        plait.prepare(model, optimizer, micro_batches=2)
    with pytest.raises(PlanError, match="memory that only a parent"):
        plait.prepare(model, optimizer, plan="hogwild")
    with pytest.raises(UsageError, match="asked for before the first"):
        float(parts(made("zero3")[0])[1])


def test_numbers_that_change_with_every_step_are_to_be_tensors(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    before = len(model._forms._known)
    for beta in (0.1, 0.2, 0.3):
        (parts(model)[0] * torch.tensor(beta)).backward()
    assert len(model._forms._known) == before + 1


def test_the_loop_draws_what_it_draws_alone() -> None:
    """Its second epoch has the order that it has in plain PyTorch, though a program was made in the first."""

    def order(plan: str | None) -> list[Any]:
        model, optimizer = made(plan)
        loader: Any = DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True)
        loader = loader if plan is None else plait.prepare(loader)
        seen = []
        for x, y in [batch for _ in range(3) for batch in loader]:
            F.cross_entropy(model(x)["scores"], y).backward()
            optimizer.step()
            seen.append((x.tolist(), random.random(), torch.rand(()).item()))
        return seen

    random.seed(0)
    expected = order(None)
    random.seed(0)
    assert order("zero3") == expected
