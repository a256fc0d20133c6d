"""A parameter server for an algorithm that is no neural network, lecture 003: k-means, sharded and co-located.

python -m examples.lectures.lecture003_server_for_anything
"""

import torch
from examples.digits_mlp import digits
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves
from examples.lectures.runs import trained
from torch import Tensor, nn

import plait

CLUSTERS, STEPS = 10, 40


class Centers(nn.Module):
    """The state that all workers share: k centers. What a worker computes is how far each of its points is."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(digits().tensors[0][:CLUSTERS].clone())

    def forward(self, points: Tensor) -> Tensor:
        return torch.cdist(points, self.centers).square().amin(1)


def job() -> plait.Job:
    """Minimizing the mean squared distance to the nearest center by gradient steps is k-means by mini-batches."""
    return plait.Job(
        model=Centers,
        data=[(image, torch.zeros(())) for image in digits().tensors[0]],
        loss=lambda squares, _: squares.mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        batch=len(digits()),
        steps=STEPS,
    )


def exhibit() -> Exhibit:
    ways = {
        "one process": ("single", None, {}),
        "one server, two workers": ("server-sync", 3, {"sync": {"servers": 1}}),
        "two servers, the state sharded": ("server-sync", 4, {"sync": {"servers": 2}}),
        "co-located: every worker a shard (zero1)": ("zero1", 2, {}),
        "stale by up to 3": ("server-stale", 3, {"sync": {"servers": 1, "staleness": 3}}),
        "asynchronous": ("server-async", 3, {"sync": {"servers": 1}}),
    }
    rows, losses = [], {}
    for name, (plan, ranks, settings) in ways.items():
        with trained(
            job(), plan, ranks, changes=plait.Changes(settings=settings), saving=plait.Saving(trace=False)
        ) as result:
            losses[name] = result.losses
            centers = result.weights["centers"]
        points = digits().tensors[0]
        final = torch.cdist(points, centers).square().amin(1).mean().item()
        rows.append([name, plan, f"{final:.5f}"])
    exact = [
        "one server, two workers",
        "two servers, the state sharded",
        "co-located: every worker a shard (zero1)",
    ]
    apart = max(
        abs(a - b) for name in exact for a, b in zip(losses["one process"], losses[name], strict=True)
    )
    return Exhibit(
        lecture="003",
        title="A parameter server for any iterative algorithm",
        idea="The parameter server came before deep learning: it serves whatever repeats 'read shared "
        "state, compute on own data, send an update', consistent or stale. k-means is such an algorithm: "
        "the state are the centers, an update is where its points pull them. Nothing here is a layer.",
        numbers=[
            Number(
                what="largest difference of the objective, servers to one process, 40 rounds",
                ours=f"{apart:.1e}",
            ),
            Number(what="objective after 40 rounds, one process", ours=float(rows[0][2])),
        ],
        tables=[
            Table(
                title="1,438 digits, 10 centers: mean squared distance after 40 rounds",
                columns=["state", "plan", "objective"],
                rows=rows,
            )
        ],
        pictures={
            "Objective by round": curves(
                "k-means",
                {name: list(enumerate(values)) for name, values in losses.items()},
                x="round",
                y="mean squared distance",
            )
        },
        seen="Synchronous servers, one, two or one on each worker, compute what one process does. Stale "
        "and asynchronous ones give up the order of updates and end close by.",
    )


if __name__ == "__main__":
    show(exhibit())
