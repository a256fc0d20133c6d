"""Linear regression three ways, lecture 000: analytic, gradients by hand, torch.nn; all agree.

python -m examples.lectures.lecture000_linear_regression
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.graphs import draw
from examples.lectures.runs import trained
from examples.linear_regression import least_squares, patients
from torch import Tensor, nn

import plait

STEPS, RATE = 2000, 0.1


def by_hand() -> Tensor:
    """beta_new = beta_prev - alpha * grad, with momentum; X has a column of 1s for the bias."""
    x, y = (tensor.double() for tensor in patients().tensors)
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    beta = torch.zeros(x.shape[1], 1, dtype=torch.float64)
    before = beta
    for _ in range(STEPS):
        gradient = 2 * x.T @ (x @ beta - y) / len(x)
        beta, before = beta - RATE * gradient + 0.9 * (beta - before), beta
    return beta.flatten()


def job() -> plait.Job:
    """The lecture's torch.nn version, as a job: any plan can run it."""

    def data() -> list[tuple[Tensor, Tensor]]:
        return [(x.double(), y.double()) for x, y in zip(*patients().tensors, strict=True)]

    return plait.Job(
        model=lambda: nn.Linear(10, 1).double(),
        data=data,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
        batch=442,
        steps=STEPS,
    )


def by_plait() -> Tensor:
    with trained(job(), "ddp", 2, saving=plait.Saving(trace=False)) as result:
        return torch.cat([result.weights["weight"].flatten(), result.weights["bias"]])


def exhibit() -> Exhibit:
    found = {"analytic": least_squares(), "by hand": by_hand(), "torch.nn, ddp on 2": by_plait()}
    names = [f"x{at}" for at in range(10)] + ["1"]
    gaps = {name: (beta - found["analytic"]).abs().max().item() for name, beta in found.items()}
    return Exhibit(
        lecture="000",
        title="Linear regression three ways",
        idea="The betas that minimize the squared error can be had from the normal equations, by "
        "gradient descent with a gradient that is written out, or by torch.nn, which finds the gradient "
        "itself. They are the same betas.",
        numbers=[
            Number(
                what="by hand, largest difference to the analytic solution", ours=f"{gaps['by hand']:.1e}"
            ),
            Number(what="torch.nn on two processes, the same", ours=f"{gaps['torch.nn, ddp on 2']:.1e}"),
        ],
        tables=[
            Table(
                title="The betas for 442 diabetes patients, all columns standardised",
                columns=["beta", *found],
                rows=[
                    [name, *(f"{beta[at].item():.6f}" for beta in found.values())]
                    for at, name in enumerate(names)
                ],
            )
        ],
        pictures={
            "Linear regression as a graph, forward and backward": draw(
                "L = (y - beta x)^2", plait.capture(job())
            )
        },
        seen=f"After {STEPS} steps (with momentum: one of the better methods that the lecture mentions) "
        "all three agree. The graph is what lecture 000 calls the computational graph: plait captures it "
        "from the module, and the plan decides where its ops run.",
    )


if __name__ == "__main__":
    show(exhibit())
