"""ResNet-18 with batch normalisation on Fashion-MNIST, with the stem for small images.

    plait run examples/resnet18_fashion.py --plan ddp --ranks 2
    python examples/resnet18_fashion.py

He et al. 2016, eight basic blocks; `width` is the number of channels of the first (64 in the paper, 8 here, to take
under a minute on two cores). Batch statistics are those of the whole batch, however many ranks share it.
Tells ten kinds of clothing apart with 0.83 accuracy (chance: 0.1).
"""

import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

SUBSET = Path(__file__).parent / "data" / "fashion_subset.npz"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def fashion(*, held_out: bool = False) -> TensorDataset:
    """Images standardised by the training set's mean and deviation, and their labels."""
    if DEBIAN.is_dir():
        part = "t10k" if held_out else "train"
        files = (DEBIAN / f"{part}-images-idx3-ubyte.gz", 16), (DEBIAN / f"{part}-labels-idx1-ubyte.gz", 8)
        images, labels = (
            np.frombuffer(gzip.decompress(path.read_bytes())[head:], np.uint8) for path, head in files
        )
    else:
        part = "test" if held_out else "train"
        with np.load(SUBSET) as file:
            images, labels = file[f"{part}_images"], file[f"{part}_labels"]
    pixels = torch.tensor(images.reshape(-1, 1, 28, 28), dtype=torch.float32) / 255
    return TensorDataset((pixels - 0.286) / 0.353, torch.tensor(labels, dtype=torch.long))


class BasicBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        projection = (nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))
        self.skip = nn.Sequential(*projection) if stride != 1 or num_in != num_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def resnet18(width: int) -> nn.Module:
    blocks: list[nn.Module] = []
    num_in = width
    for level in range(4):
        for stride in (1 if level == 0 else 2, 1):
            blocks.append(BasicBlock(num_in, width << level, stride))
            num_in = width << level
    stem = (nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 10))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def job(width: int = 8, steps: int = 220) -> plait.Job:
    return plait.Job(
        model=lambda: resnet18(width),
        data=fashion,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
        schedule=lambda step: 0.05 * (1 - step / steps),
        batch=64,
        steps=steps,
        evaluate=lambda: fashion(held_out=True),
        evaluate_every=110,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    result = plait.train(job(), plan="ddp", ranks=2)
    model = resnet18(8).eval()
    model.load_state_dict(result.weights)
    images, labels = fashion(held_out=True).tensors
    with torch.no_grad():
        print(f"loss: {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
        print(f"held-out accuracy: {accuracy(model(images[:1000]), labels[:1000]).item():.3f}")
