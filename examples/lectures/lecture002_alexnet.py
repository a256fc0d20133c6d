"""AlexNet as it was in 2012, at its full shape, with its split over two devices: lectures 002 and 003.

python -m examples.lectures.lecture002_alexnet
"""

from collections import OrderedDict
from pathlib import Path

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from torch import nn
from torch.utils.data import TensorDataset

import plait

SPLIT = Path(__file__).parents[1] / "alexnet_two_devices.yaml"
PAPER = {"input": 150_528, "conv1": 253_440, "conv2": 186_624, "conv3": 64_896, "conv4": 64_896, "conv5": 43_264,
         "fc6": 4096, "fc7": 4096, "fc8": 1000}  # fmt: skip
"""Neurons of each layer, from the caption of the paper's Fig. 2, which lecture 003 shows."""


def alexnet() -> nn.Module:
    """60 million parameters; conv2, conv4 and conv5 see the channels of their own device."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 96, 11, stride=4, padding=2), "relu1": nn.ReLU(),
        "norm1": nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2), "pool1": nn.MaxPool2d(3, 2),
        "conv2": nn.Conv2d(96, 256, 5, padding=2, groups=2), "relu2": nn.ReLU(),
        "norm2": nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2), "pool2": nn.MaxPool2d(3, 2),
        "conv3": nn.Conv2d(256, 384, 3, padding=1), "relu3": nn.ReLU(),
        "conv4": nn.Conv2d(384, 384, 3, padding=1, groups=2), "relu4": nn.ReLU(),
        "conv5": nn.Conv2d(384, 256, 3, padding=1, groups=2), "relu5": nn.ReLU(), "pool5": nn.MaxPool2d(3, 2),
        "flatten": nn.Flatten(),
        "drop6": nn.Dropout(0.5), "fc6": nn.Linear(9216, 4096), "relu6": nn.ReLU(),
        "drop7": nn.Dropout(0.5), "fc7": nn.Linear(4096, 4096), "relu7": nn.ReLU(),
        "fc8": nn.Linear(4096, 1000),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(2, 3, 224, 224, generator=generator), torch.tensor([7, 8]))


def job() -> plait.Job:
    return plait.Job(
        model=alexnet,
        data=images,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4),
        batch=2,
        steps=1,
    )


def neurons() -> dict[str, int]:
    """Numbers that each layer gives for one image."""
    found = {"input": 3 * 224 * 224}
    value = images().tensors[0][:1]
    with torch.no_grad():
        for name, layer in alexnet().eval().named_children():
            value = layer(value)
            if name in PAPER:
                found[name] = value[0].numel()
    return found


def exhibit() -> Exhibit:
    found = neurons()
    placed = plait.placements(job(), SPLIT)
    exchanges = [one for one in placed.listing.transfers if one.collective != "none"]
    proof = plait.verify(job(), SPLIT, steps=1, serial=True)
    size = sum(parameter.numel() for parameter in alexnet().parameters())
    return Exhibit(
        lecture="002",
        title="AlexNet 2012 on its two devices",
        idea="AlexNet was trained on two GPUs with half of the kernels on each, which exchange "
        "activations only in some layers: the first well-known model that was cut by tensors. Here it is "
        "at its full shape with that cut as a placement file.",
        numbers=[
            Number(what="parameters", lecture="60 million", ours=f"{size:,}"),
            Number(what="equal to one device after a step", ours="yes" if proof.ok else "no"),
            Number(what="exchanges in a step", ours=float(len(exchanges))),
            *[
                Number(
                    what=f"neurons of {name}",
                    lecture=f"{PAPER[name]:,}",
                    ours=f"{count:,}",
                    note="" if count == PAPER[name] else "55 x 55 x 96; the caption has 55 x 48 x 96",
                )
                for name, count in found.items()
            ],
        ],
        tables=[
            Table(
                title="What the two devices exchange in a step of 2 images",
                columns=["when", "for", "how", "what", "bytes"],
                rows=[
                    [
                        one.phase,
                        one.module or "the whole step",
                        one.collective,
                        one.what,
                        f"{one.num_bytes:,}",
                    ]
                    for one in exchanges
                ],
            )
        ],
        seen="conv2, conv4 and conv5 exchange nothing for their own sake, as in the paper; conv3 and the "
        "dense layers gather the other half. The response normalisation of the paper runs over "
        "neighbouring kernels of one device; over all kernels, as here, its edges are exchanged too. One "
        "of the caption's numbers is wrong: 55 x 55 x 96 is 290,400.",
    )


if __name__ == "__main__":
    show(exhibit())
