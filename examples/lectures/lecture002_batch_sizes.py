"""Gradient descent from one sample to all of them, lecture 002: standard, stochastic, mini-batch, batch.

python -m examples.lectures.lecture002_batch_sizes
"""

import torch
from examples.digits_mlp import accuracy, digits
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves
from examples.lectures.runs import trained
from torch import nn

import plait

EPOCHS = 3
VARIANTS = {
    "standard, B = 1 in order": (1, False, 0.02),
    "stochastic, B = 1": (1, True, 0.02),
    "mini-batch, B = 8": (8, True, 0.1),
    "mini-batch, B = 64": (64, True, 0.3),
    "batch, B = all": (0, True, 0.5),
}
"""Batch (0: all), whether shuffled, learning rate."""


def job(batch: int, *, shuffle: bool, lr: float) -> plait.Job:
    data = digits()
    return plait.Job(
        model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=batch or len(data),
        epochs=EPOCHS,
        shuffle=shuffle,
        evaluate=lambda: digits(held_out=True),
        metrics={"accuracy": accuracy},
    )


def exhibit() -> Exhibit:
    lines: dict[str, list[tuple[float, float]]] = {}
    rows: list[list[float | str]] = []
    for name, (batch, shuffle, lr) in VARIANTS.items():
        with trained(
            job(batch, shuffle=shuffle, lr=lr), "single", saving=plait.Saving(trace=False)
        ) as result:
            losses, found = result.losses, result.evaluation
        size = batch or len(digits())
        window = max(1, 64 // size)
        means = [sum(losses[at : at + window]) / window for at in range(0, len(losses) - window + 1, window)]
        lines[name] = [((at + 1.0) * window * size, mean) for at, mean in enumerate(means)]
        rows.append([name, len(losses), lr, f"{means[-1]:.3f}", f"{found['accuracy']:.3f}"])
    best = max(float(row[-1]) for row in rows)
    return Exhibit(
        lecture="002",
        title="Gradient descent from batch 1 to all",
        idea="Gradient descent may step after every sample (standard in order, stochastic in random "
        "order), after all samples (batch) or after some (mini-batch). Few samples a step make many "
        "noisy steps an epoch, all samples make one exact step.",
        numbers=[Number(what="best held-out accuracy after 3 epochs", ours=best)],
        tables=[
            Table(
                title="1,438 handwritten digits, 3 epochs",
                columns=["variant", "steps", "lr", "loss", "accuracy"],
                rows=rows,
            )
        ],
        pictures={
            "Loss against samples seen, means of 64 samples": curves(
                "loss by samples seen", lines, x="samples", y="loss"
            )
        },
        seen="With the same number of samples read, one step an epoch hardly moves; batches of 1 and 8 "
        "have converged. On one device that argues for small batches; on many, a batch must be large "
        "enough to share out.",
    )


if __name__ == "__main__":
    show(exhibit())
