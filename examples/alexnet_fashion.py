"""An AlexNet for 28 x 28 pixels on Fashion-MNIST: five convolutions, overlapping pooling, dropout.

    plait run examples/alexnet_fashion.py --plan ddp --ranks 2
    plait run examples/alexnet_fashion.py --plan examples/alexnet_two_devices.yaml     # as in the paper
    python examples/alexnet_fashion.py

Krizhevsky et al. 2012, with channels and pooling scaled to small grey images. Trains on the shipped 3,500 images,
or on all 60,000 where Debian's `dataset-fashion-mnist` is installed.
Tells ten kinds of clothing apart with 0.77 accuracy (chance: 0.1).
"""

import gzip
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
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


def alexnet() -> nn.Module:
    """The original in small: conv2, conv4 and conv5 see one half of the channels each (`groups=2`), the others all."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, 32, 5, padding=2),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(3, 2),
        "conv2": nn.Conv2d(32, 64, 3, padding=1, groups=2),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(3, 2),
        "conv3": nn.Conv2d(64, 96, 3, padding=1),
        "relu3": nn.ReLU(),
        "conv4": nn.Conv2d(96, 96, 3, padding=1, groups=2),
        "relu4": nn.ReLU(),
        "conv5": nn.Conv2d(96, 64, 3, padding=1, groups=2),
        "relu5": nn.ReLU(),
        "pool5": nn.MaxPool2d(3, 2),
        "flatten": nn.Flatten(),
        "drop6": nn.Dropout(0.5),
        "fc6": nn.Linear(256, 256),
        "relu6": nn.ReLU(),
        "drop7": nn.Dropout(0.5),
        "fc7": nn.Linear(256, 256),
        "relu7": nn.ReLU(),
        "fc8": nn.Linear(256, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def job() -> plait.Job:
    return plait.Job(
        model=alexnet,
        data=fashion,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=64,
        steps=440,
        evaluate=lambda: fashion(held_out=True),
        evaluate_every=110,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    result = plait.train(job(), plan="ddp", ranks=2)
    model = alexnet().eval()
    model.load_state_dict(result.weights)
    images, labels = fashion(held_out=True).tensors
    with torch.no_grad():
        print(f"loss: {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
        print(f"held-out accuracy: {accuracy(model(images[:1000]), labels[:1000]).item():.3f}")
