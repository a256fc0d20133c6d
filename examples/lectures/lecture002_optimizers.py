"""Lecture 002's table of optimizers, each formula against torch step by step.

python -m examples.lectures.lecture002_optimizers
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.runs import trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

LR, STEPS, EPSILON = 0.01, 20, 1e-8
TRUE = torch.tensor([[1.0, -2.0, 0.5, 3.0]]).double()


def points() -> TensorDataset:
    """A straight line in four dimensions, with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ TRUE.T + 0.1 * torch.randn(32, 1, generator=generator, dtype=torch.float64))


@dataclass
class Rule:
    """A formula with its memory. `sign` and `inside` as the table prints them or as they must be."""

    step: Callable[["Rule", Tensor, Tensor, int], Tensor]
    sign: float = -1.0
    inside: bool = False
    """Whether epsilon is added inside the root."""
    memory: dict[str, Tensor] = field(default_factory=dict)

    def scaled(self, top: Tensor, square: Tensor) -> Tensor:
        return self.sign * LR * top / ((square + EPSILON).sqrt() if self.inside else square.sqrt() + EPSILON)

    def kept(self, name: str, like: Tensor) -> Tensor:
        return self.memory.get(name, torch.zeros_like(like))


def descent(rule: Rule, w: Tensor, g: Tensor, t: int) -> Tensor:
    return w - LR * g


def momentum(rule: Rule, w: Tensor, g: Tensor, t: int) -> Tensor:
    before = rule.memory.get("w", w)
    rule.memory["w"] = w
    return w + 0.9 * (w - before) - LR * g


def adagrad(rule: Rule, w: Tensor, g: Tensor, t: int) -> Tensor:
    rule.memory["A"] = rule.kept("A", g) + g * g
    return w + rule.scaled(g, rule.memory["A"])


def rmsprop(rule: Rule, w: Tensor, g: Tensor, t: int) -> Tensor:
    rule.memory["B"] = 0.99 * rule.kept("B", g) + 0.01 * g * g
    return w + rule.scaled(g, rule.memory["B"])


def adam(rule: Rule, w: Tensor, g: Tensor, t: int) -> Tensor:
    rule.memory["1"] = 0.9 * rule.kept("1", g) + 0.1 * g
    rule.memory["2"] = 0.999 * rule.kept("2", g) + 0.001 * g * g
    return w + rule.scaled(rule.memory["1"] / (1 - 0.9**t), rule.memory["2"] / (1 - 0.999**t))


RULES = {
    "gradient descent": (descent, lambda p: torch.optim.SGD(p, lr=LR)),
    "momentum": (momentum, lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "Adagrad": (adagrad, lambda p: torch.optim.Adagrad(p, lr=LR, eps=EPSILON)),
    "RMSprop": (rmsprop, lambda p: torch.optim.RMSprop(p, lr=LR, alpha=0.99, eps=EPSILON)),
    "Adam": (adam, lambda p: torch.optim.Adam(p, lr=LR, eps=EPSILON)),
}


def model() -> nn.Module:
    made = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[0.1, 0.2, -0.1, 0.3]]))
    return made


def gap(rule: Rule, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> float:
    """The largest difference of weights between the formula and torch in 20 steps, each from its own weights."""
    x, y = points().tensors
    network = model()
    optimizer = make(list(network.parameters()))
    (weight,) = network.parameters()
    own, most = weight.detach().clone(), 0.0
    for t in range(1, STEPS + 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()
        gradient = 2 * (x @ own.T - y).T @ x / len(x)
        own = rule.step(rule, own, gradient, t)
        most = max(most, (own - weight.detach()).abs().max().item())
    return most


def by_plait(make: Callable[[list[Tensor]], torch.optim.Optimizer], rule: Rule) -> float:
    """The same between the formula and a run of plait on two processes, after 20 steps."""
    job = plait.Job(model=model, data=points, loss=nn.MSELoss(), optimizer=make, batch=32, steps=STEPS)
    with trained(job, "ddp", 2) as result:
        weight = result.weights["weight"]
    x, y = points().tensors
    own = next(model().parameters()).detach().clone()
    for t in range(1, STEPS + 1):
        own = rule.step(rule, own, 2 * (x @ own.T - y).T @ x / len(x), t)
    return (own - weight).abs().max().item()


def exhibit() -> Exhibit:
    rows: list[list[float | str]] = []
    worst = 0.0
    for name, (step, make) in RULES.items():
        right = gap(Rule(step=step), make)
        run = by_plait(make, Rule(step=step))
        worst = max(worst, right, run)
        adaptive = name in ("Adagrad", "RMSprop", "Adam")
        sign = gap(Rule(step=step, sign=1.0), make) if adaptive else right
        inside = gap(Rule(step=step, inside=True), make) if adaptive else right
        rows.append([name, f"{right:.1e}", f"{run:.1e}", f"{sign:.1e}", f"{inside:.1e}"])
    return Exhibit(
        lecture="002",
        title="Every optimizer's formula against torch",
        idea="The lecture lists five rules that make a step of a gradient. Each is written out here as a "
        "formula and compared with torch's class over 20 steps in float64, and with a run of plait on "
        "two processes.",
        numbers=[
            Number(what="largest difference, formulas put right", ours=worst),
            Number(
                what="sign of the adaptive rules",
                lecture="+ eta",
                ours="- eta",
                note="a step goes down the gradient",
            ),
            Number(
                what="epsilon",
                lecture="inside the root",
                ours="outside",
                note="torch and the papers of RMSprop's users and Adam",
            ),
            Number(
                what="Adam's moments",
                lecture="divided by 1 - beta^t in the recursion",
                ours="divided when used",
                note="else the correction piles up from step to step",
            ),
        ],
        tables=[
            Table(
                title="Largest difference of a weight in 20 steps",
                columns=[
                    "rule",
                    "right, to torch",
                    "right, to plait on 2",
                    "with + eta",
                    "with epsilon inside",
                ],
                rows=rows,
            )
        ],
        seen="With -eta and epsilon outside of the root all five agree to rounding. As printed, Adagrad, "
        "RMSprop and Adam climb: after 20 steps they are where they should not be. Epsilon's place "
        "changes little at 1e-8.",
    )


if __name__ == "__main__":
    show(exhibit())
