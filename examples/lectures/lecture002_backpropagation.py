"""The backpropagation example of lecture 002, step by step from the captured graph, to -0.0315.

python -m examples.lectures.lecture002_backpropagation
"""

import math

import torch
from examples.lectures.exhibit import Exhibit, Number, show
from examples.lectures.graphs import draw, listing, walk
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

HIDDEN = torch.tensor([[0.5, 0.2, 0.9, 0.4]])
"""The hidden layer: h1 = 0.5 is the slide's, the others do not matter to its number."""
TARGET = torch.tensor([[1.0, 0.0]])
"""y1 - 0.7 = 0.3 on the slide."""


class Output(nn.Module):
    """The second layer: four hidden neurons, two outputs; its first output is the slide's 0.7."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.3, 0.1], [0.2, -0.3], [0.1, 0.2], [0.0, 0.4]]))
        with torch.no_grad():
            others = (HIDDEN[0, 1:] * self.weight[1:, 0]).sum()
            self.weight[0, 0] = (math.log(0.7 / 0.3) - others) / HIDDEN[0, 0]

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sigmoid(hidden @ self.weight)


def half_squares(output: Tensor, target: Tensor) -> Tensor:
    """The slide's loss: half of the sum of squares."""
    return ((target - output) ** 2).sum(1).mean() / 2


def job() -> plait.Job:
    return plait.Job(
        model=Output,
        data=TensorDataset(HIDDEN, TARGET),
        loss=half_squares,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=1,
        steps=1,
    )


def exhibit() -> Exhibit:
    graph, walked = walk(job(), (HIDDEN, TARGET))
    model = Output()
    output = model(HIDDEN)
    output.retain_grad()
    half_squares(output, TARGET).backward()
    gradient = next(one.value for one in walked if one.name == graph.gradients["weight"])
    assert gradient is not None and output.grad is not None
    first = output[0, 0].item()
    return Exhibit(
        lecture="002",
        title="Backpropagation by hand and by graph",
        idea="The gradient of a weight is a product of three factors, from the loss back to the weight: "
        "dL/dy1, dy1/dn1 and dn1/dw11. The captured graph of the step holds the same factors as ops, "
        "forward and backward, and is walked here op by op.",
        numbers=[
            Number(what="dL/dy1 = -(y1 - y1')", lecture=-0.3, ours=output.grad[0, 0].item()),
            Number(what="dy1/dn1 = y1 (1 - y1)", lecture=0.21, ours=first * (1 - first)),
            Number(what="dn1/dw11 = h1", lecture=0.5, ours=HIDDEN[0, 0].item()),
            Number(what="dL/dw11, by the graph", lecture=-0.0315, ours=gradient[0, 0].item()),
        ],
        texts={"The graph of the step, walked": listing(walked)},
        pictures={
            "The captured graph: inputs grey, forward blue, backward green": draw(
                "one neuron, one step", graph
            )
        },
        seen="The product of the slide and the gradient that the graph computes agree. The slide leaves "
        "the other weights and neurons open; they were chosen so that the output is its 0.7.",
    )


if __name__ == "__main__":
    show(exhibit())
