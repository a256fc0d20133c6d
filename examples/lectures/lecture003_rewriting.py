"""Both rewriting examples of lecture 003, with times before and after: associativity, and two products merged.

python -m examples.lectures.lecture003_rewriting
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.graphs import draw
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait


class Chain(nn.Module):
    """(X W1) W2, where W1 is wide: X (W1 W2) costs less when X has many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(64, 1024) / 32, requires_grad=False)
        self.two = nn.Parameter(torch.randn(1024, 64) / 32, requires_grad=False)
        self.out = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x @ self.one) @ self.two)


class Pair(nn.Module):
    """Two products of one input: one product of both weights side by side, then split."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.left(x)) * self.right(x)


def job(model: type[nn.Module], width: int) -> plait.Job:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(512, 64, generator=generator), torch.randn(512, width, generator=generator)
    )
    return plait.Job(
        model=model,
        data=data,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=512,
        steps=3,
    )


CASES = {"(X W1) W2 to X (W1 W2)": (Chain, 8), "two products of one input merged": (Pair, 64)}


def exhibit() -> Exhibit:
    numbers: list[Number] = []
    rows: list[list[float | str]] = []
    pictures, rules = {}, {}
    for name, (model, width) in CASES.items():
        given = job(model, width)
        found = plait.rewritten(given)
        proof = plait.verify(given, "ddp", 2, serial=True, changes=plait.Changes(settings={"rewrite": "on"}))
        assert found.before.measured_s is not None and found.after.measured_s is not None
        numbers += [
            Number(
                what=f"{name}: time after, to before", ours=found.after.measured_s / found.before.measured_s
            ),
            Number(what=f"{name}: equal to one device", ours="yes" if proof.ok else "no"),
        ]
        for when, costs in (("before", found.before), ("after", found.after)):
            rows.append(
                [
                    name,
                    when,
                    costs.ops,
                    f"{costs.flops / 1e6:.1f} M",
                    f"{1e3 * (costs.measured_s or 0.0):.2f} ms",
                ]
            )
        pictures[f"{name}: before"] = draw("before", plait.capture(given))
        pictures[f"{name}: after"] = draw("after", found.graph)
        rules[name] = found.line
    return Exhibit(
        lecture="003",
        title="A graph rewritten into a cheaper equal one",
        idea="TASO's two examples: a product of three matrices may be grouped either way, and two "
        "products of one input are one product with both weights side by side. plait writes down all "
        "forms that a few equations allow (an e-graph) and takes the cheapest by its cost model; forward "
        "and backward change together.",
        numbers=numbers,
        tables=[
            Table(
                title="A training step of 512 samples",
                columns=["example", "when", "ops", "FLOPs", "measured"],
                rows=rows,
            )
        ],
        pictures=pictures,
        texts={f"Rules, {name}": line for name, line in rules.items()},
        seen="Parameters, names and checkpoints stay the user's: merged weights lie side by side in "
        "memory, so that joining them is no copy. `plait graph JOB --rewrite` shows this for any job.",
    )


if __name__ == "__main__":
    show(exhibit())
