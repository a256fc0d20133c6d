"""The network that lecture 002 prints, which does not run, and its correction; and lecture 000's snippet.

python -m examples.lectures.lecture002_printed_network
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from examples.alexnet_fashion import SUBSET
from examples.lectures.exhibit import Exhibit, Number, show
from examples.lectures.runs import trained
from torch import Tensor, nn

import plait


class Net(nn.Module):
    """As printed, but for `flat`, 16 * 5 * 5 on the slide, and its last line."""

    def __init__(self, flat: int = 16 * 5 * 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc = nn.Linear(flat, 120)
        self.out = nn.Linear(120, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc(x))
        return self.out(x)


def images() -> torch.utils.data.TensorDataset:
    """Trousers and bags of Fashion-MNIST, as 3 x 32 x 32: CIFAR-10 is a download, these are shipped."""
    with np.load(SUBSET) as file:
        pixels, labels = torch.tensor(file["train_images"]), torch.tensor(file["train_labels"]).long()
    chosen = (labels == 1) | (labels == 8)
    padded = F.pad(pixels[chosen].reshape(-1, 1, 28, 28).float() / 255 - 0.286, (2, 2, 2, 2))
    return torch.utils.data.TensorDataset(
        padded.expand(-1, 3, -1, -1).contiguous(), (labels[chosen] == 8).long()
    )


def job() -> plait.Job:
    """The lecture's loop: cross entropy, SGD with lr 0.001 and momentum 0.9, two epochs."""
    return plait.Job(
        model=lambda: Net(6 * 14 * 14),
        data=images,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
        batch=4,
        epochs=2,
        evaluate=images,
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
    )


def said(call: Callable[[], object]) -> str:
    """What a call ends with."""
    try:
        call()
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "it runs"


def exhibit() -> Exhibit:
    picture = torch.zeros(1, 3, 32, 32)
    flat = Net(6 * 14 * 14)
    size = torch.flatten(flat.pool(F.relu(flat.conv(picture))), 1).shape[1]
    with trained(job(), "ddp", 2, saving=plait.Saving(trace=False)) as result:
        accuracy = result.evaluation["accuracy"]
    told = {
        "002, Net()(a picture of CIFAR-10's size)": said(lambda: Net()(picture)),
        "002, loss.backwards()": said(lambda: torch.ones((), requires_grad=True).backwards()),  # type: ignore[attr-defined]
        "000, torch.random.randn(X.shape, 1)": said(lambda: torch.random.randn((3, 4), 1)),  # type: ignore[attr-defined]
        "000, nn.MSELoss(yhat, y)": said(lambda: nn.MSELoss(torch.zeros(3), torch.ones(3))),
    }
    return Exhibit(
        lecture="002",
        title="The printed programs, and their corrections",
        idea="Programs on slides are seldom run. This network's flattened size was taken over from a "
        "tutorial that has a second convolution, so it stops at its first image; the text beside it "
        "calls `loss.backwards()`; lecture 000's snippet makes weights by a function that does not exist "
        "and hands the predictions to the loss's constructor.",
        numbers=[
            Number(
                what="flattened size of Net for 32 x 32",
                lecture=400,
                ours=float(size),
                note="6 channels of 14 x 14",
            ),
            Number(
                what="accuracy of the corrected Net, 2 epochs, ddp on 2",
                ours=accuracy,
                note="trousers and bags: chance is 0.5",
            ),
        ],
        texts={
            "What the printed lines say": "\n".join(f"{what}\n    {text}" for what, text in told.items()),
            "The corrections": "self.fc = nn.Linear(6 * 14 * 14, 120)\nloss.backward()\n"
            "beta = torch.randn(x.shape[1], 1)\nloss = nn.MSELoss()(yhat, y)",
        },
        seen="With the one number corrected the network learns, by the lecture's own loop and optimizer. "
        "CIFAR-10 cannot be downloaded by a test; two kinds of Fashion-MNIST, shipped here, take its "
        "place.",
    )


if __name__ == "__main__":
    show(exhibit())
