"""The small network of lecture 000's slides: its graph drawn, walked, and trained.

python -m examples.lectures.lecture000_small_network
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, show
from examples.lectures.graphs import draw, listing, walk
from examples.lectures.runs import trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait


class ToyModel(nn.Module):
    """As printed: two linear layers and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = torch.nn.Linear(10, 10)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.net1(x))
        return self.net2(x)


def points() -> TensorDataset:
    """A bent function of ten numbers."""
    x = torch.randn(256, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1].abs() + 0.5 * x[:, 1:2])


def job() -> plait.Job:
    return plait.Job(
        model=ToyModel,
        data=points,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch=32,
        epochs=40,
    )


def exhibit() -> Exhibit:
    torch.manual_seed(0)
    graph, walked = walk(job(), tuple(column[:32] for column in points().tensors))
    with trained(job(), "ddp", 2, saving=plait.Saving(trace=False)) as result:
        first, last = result.losses[0], result.losses[-1]
    forward = [one for one in walked if one.phase == "forward"]
    return Exhibit(
        lecture="000",
        title="A network is a graph of operations on tensors",
        idea="The slides call PyTorch a workflow system whose records are tensors: a module is a graph "
        "of operations, and the backward pass is a second graph that autograd derives. This is the graph "
        "of a whole step of the slides' ToyModel.",
        numbers=[
            Number(what="operations forward, with the loss", ours=float(len(forward))),
            Number(what="operations backward", ours=float(len(walked) - len(forward))),
            Number(what="loss of the first step", ours=first),
            Number(what="loss of the last, 40 epochs, two processes", ours=last),
        ],
        texts={"The graph, walked with 32 samples": listing(walked)},
        pictures={"ToyModel, one step: inputs grey, forward blue, backward green": draw("ToyModel", graph)},
        seen="`plait graph FILE` shows the same for any model as a page in which modules fold and unfold.",
    )


if __name__ == "__main__":
    show(exhibit())
