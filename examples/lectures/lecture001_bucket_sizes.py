"""Gradient bucketing, lecture 001: from one tensor a bucket to one bucket, measured on a slow link and predicted.

python -m examples.lectures.lecture001_bucket_sizes
"""

import statistics

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves
from examples.lectures.runs import trained
from torch import nn
from torch.utils.data import TensorDataset

import plait

NETWORK = "bandwidth=400Mbit,latency=3ms,hosts=2x1"
SIZES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 64.0)
"""MiB."""
NAMES = {0.0: "a tensor", 64.0: "all"}
WIDTH, LAYERS, BATCH, STEPS = 256, 24, 1536, 10


def model() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def job() -> plait.Job:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
    )
    return plait.Job(
        model=model,
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=BATCH,
        steps=STEPS,
    )


def measured(size: float, *, overlap: bool = True) -> float:
    """Seconds a step, the median without the first."""
    settings = {"sync": {"bucket_mib": size, "overlap": overlap}}
    with trained(
        job(),
        "ddp",
        2,
        changes=plait.Changes(settings=settings),
        saving=plait.Saving(trace=False),
        trial=plait.Trial(emulate=NETWORK),
    ) as result:
        return statistics.median(line["step_s"] for line in result.history[2:] if "step_s" in line)


def exhibit() -> Exhibit:
    found = {size: measured(size) for size in SIZES}
    without = measured(64.0, overlap=False)
    best = min(found, key=lambda size: found[size])
    count = sum(1 for _ in model().parameters())
    gradients = sum(p.numel() for p in model().parameters()) * 4 / 2**20
    return Exhibit(
        lecture="001",
        title="How large should a bucket be?",
        idea="Time of a message is latency plus bytes over bandwidth. One bucket a tensor pays the "
        "latency as often as there are tensors; one bucket for all misses out on overlap, because it is "
        "full only when the backward is done. In between lies the best, as in the lecture's sketch.",
        numbers=[
            Number(what="gradients", ours=f"{gradients:.1f} MiB in {count} tensors"),
            Number(what="best bucket, MiB", ours=best),
            Number(what="one bucket a tensor, to the best", ours=found[0.0] / found[best]),
            Number(what="one bucket, to the best", ours=found[64.0] / found[best]),
            Number(what="one bucket without overlap, to the best", ours=without / found[best]),
        ],
        tables=[
            Table(
                title=f"Two processes, {NETWORK}",
                columns=["bucket, MiB", "step"],
                rows=[[NAMES.get(size, size), f"{1e3 * s:.0f} ms"] for size, s in found.items()],
            )
        ],
        pictures={
            "Step time by bucket size": curves(
                "step by bucket size",
                {"measured": [(max(size, 0.125), 1e3 * s) for size, s in found.items()]},
                x="MiB a bucket (left: a tensor each, right: one)",
                y="ms a step",
                log_x=True,
            )
        },
        seen="The network is emulated between two processes of this machine: messages are delayed as "
        "that link would. The default of a bucket is the size at which the measured link's latency is "
        "small beside its transfer.",
    )


if __name__ == "__main__":
    show(exhibit())
