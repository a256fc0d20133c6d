"""Loops of the user's own under plans that cut the model or its state, on two ranks, against the same loop alone."""

import copy
from typing import Any

import pytest
import torch
from tests.ranks.own_loops.test_own_loop import close, data, net, own_loop
from torch import nn
from torch.nn import functional as F

import plait
from plait.errors import PlaitError

pytestmark = pytest.mark.timeout(240)

PLANS = {
    "zero3": {"batch": 11, "norm": False, "penalty": 0.01},
    "zero1": {"batch": 6, "norm": True, "accumulate": 3},
    "1f1b": {"batch": 6, "norm": True},
    "megatron": {"batch": 6, "norm": False},
}
"""Unequal and empty shares, labels that do not count, penalties, batch norm, accumulation: one of each."""


def saved_and_loaded(plan: str | None) -> list[Any]:
    """A loop that stops after two steps and goes on in another model from what was saved."""
    x, y = data().tensors
    saved: Any = None
    for _ in range(2):
        model = net(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        if plan is not None:
            model, optimizer = plait.prepare(model, optimizer, plan=plan)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = (model.state_dict(), optimizer.state_dict())
    moments = [entry["exp_avg_sq"].tolist() for entry in saved[1]["state"].values()]
    return [[value.tolist() for value in saved[0].values()], moments]


def apart() -> list[Any]:
    """Workers of local-sgd: one has nothing of the second step, of the third both average."""
    x, y = torch.arange(8.0).double().view(4, 2), torch.ones(4, 1).double()
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = plait.prepare(model, optimizer, plan="local-sgd", settings={"average": {"every": 3}})
    rank = torch.distributed.get_rank()
    for mine in (slice(2 * rank, 2 * rank + 2), slice(0, 4 * rank), slice(rank, 3)):
        F.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.tolist() for value in model.state_dict().values()]


def refused() -> list[str]:
    """Ranks that call different things are told so, and nobody waits."""
    told = []
    x, y = data().tensors
    for act in ("state_dict", "loss"):
        model = net(False)
        model, _ = plait.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="zero3")
        F.cross_entropy(model(x), y).backward()
        try:
            if torch.distributed.get_rank() == 0 and act == "state_dict":
                model.state_dict()
            elif torch.distributed.get_rank() == 0:
                F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
            else:
                F.cross_entropy(model(x), y).backward()
        except PlaitError as error:
            told.append(str(error))
    return told


def originals() -> list[str]:
    """What a prepared module says for itself after the first backward."""
    own = net(False)
    x, y = data().tensors
    model, _ = plait.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), plan="zero3")
    own(x[:1])  # before the first backward it has its weights
    F.cross_entropy(model(x), y).backward()
    told = []
    for act in (lambda: own(x), lambda: next(own.children())(x), own.state_dict, lambda: own.load_state_dict({}),
                lambda: copy.deepcopy(own), lambda: own.eval()(x)):  # fmt: skip
        try:
            act()
            told.append("")
        except PlaitError as error:
            told.append(str(error))
    model.train()
    loss = F.cross_entropy(model(x), y) + 0.01 * sum(value.pow(2).sum() for value in own.parameters())
    with model.whole() as whole:
        alone = F.cross_entropy(whole(x), y) + 0.01 * sum(value.pow(2).sum() for value in whole.parameters())
    close(loss.item(), alone.item())  # its parameters can be parts of a loss
    return told


def work() -> list[Any]:
    found = [
        own_loop(lambda *parts, plan=plan: plait.prepare(*parts, plan=plan), **case)  # type: ignore[arg-type]
        for plan, case in PLANS.items()
    ]
    resumed = [saved_and_loaded(plan) for plan in ("zero2", "1f1b")]
    return [found, resumed, apart(), refused(), originals()]


def by_hand() -> list[Any]:
    """What `apart` should give, of two models in one process."""
    x, y = torch.arange(8.0).double().view(4, 2), torch.ones(4, 1).double()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(2, 1).double())
    for rank, model in enumerate(models):
        for mine in (slice(2 * rank, 2 * rank + 2), slice(0, 4 * rank), slice(rank, 3)):
            if len(x[mine]):
                gradients = torch.autograd.grad(F.mse_loss(model(x[mine]), y[mine]), list(model.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.sub_(0.01 * gradient)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return [((one + other) / 2).tolist() for one, other in pairs]


def test_any_plan_computes_what_the_loop_computes_alone() -> None:
    plain = [own_loop(lambda *parts: parts, **case) for case in PLANS.values()]  # type: ignore[arg-type]
    resumed, averaged = saved_and_loaded(None), by_hand()
    for cases, saved, mixed, told, original in plait.launch(work, 2):
        for found, expected in zip(cases, plain, strict=True):
            close(found["norms"], expected["norms"])
            close(found["seen"], expected["seen"])
            for name, value in expected["weights"].items():
                close(found["weights"][name], value)
        for found in saved:
            for mine, theirs in zip(found[0] + found[1], resumed[0] + resumed[1], strict=True):
                close(mine, theirs)
        for mine, theirs in zip(mixed, averaged, strict=True):
            close(mine, theirs)
        assert "calls state_dict" in told[0] and "calls loss.backward()" in told[0]
        assert "computes another loss" in told[1]
        assert all("Fix: use what plait.prepare returned" in one or "copied" in one for one in original), (
            original
        )
