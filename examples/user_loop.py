"""plait as one step of your own loop, in processes that torchrun started.

    torchrun --standalone --nproc-per-node 2 examples/user_loop.py

You keep the loop, the data and the printing; `step(share)` computes this rank's share of the batch, reduces the
gradients and updates the weights. Shares may differ in size, or be empty: the loss is the mean over the whole batch.
Each rank here draws the same order of the digits from the seed and takes its own part of every batch; the last batch of
an epoch has 5 samples, which two ranks share as 3 and 2.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import plait

DATA = Path(__file__).parent / "data" / "digits.npz"
BATCH, EPOCHS = 64, 10


def digits() -> tuple[Tensor, Tensor]:
    with np.load(DATA) as file:
        return torch.from_numpy(file["images"]).flatten(1) / 16, torch.from_numpy(file["labels"]).long()


def job() -> plait.Job:
    return plait.Job(
        model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        data=lambda: list(zip(*digits(), strict=True)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch=BATCH,
        epochs=EPOCHS,
    )


def main() -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    step = plait.parallelize(job(), "ddp")
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    for epoch in range(EPOCHS):
        total = 0.0
        for ids in torch.randperm(len(labels), generator=generator).split(BATCH):
            mine = ids.tensor_split(num_ranks)[rank]
            loss = step((images[mine], labels[mine]))
            total += float(loss) * len(ids)
        if rank == 0:
            print(f"epoch {epoch}: loss {total / len(labels):.4f}", flush=True)


if __name__ == "__main__":
    main()
