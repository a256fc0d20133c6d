"""The parameter server as a bottleneck, lecture 004: throughput over the number of workers, beside all-reduce.

python -m examples.lectures.lecture004_server_bottleneck
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves
from torch import nn
from torch.utils.data import TensorDataset

import plait

WORKERS = (1, 2, 4, 8, 16)
CLUSTER = "20x1xV100"
"""Hosts with one GPU each."""
PER_WORKER, WIDTH = 2048, 2048


def job(workers: int) -> plait.Job:
    """Four wide layers: 17 million parameters."""
    samples = PER_WORKER * workers
    data = TensorDataset(
        torch.zeros(1, WIDTH).expand(samples, -1), torch.zeros(1, dtype=torch.int64).expand(samples)
    )
    return plait.Job(
        model=lambda: nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        ),
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=samples,
        steps=1,
    )


def rate(plan: str, ranks: int, workers: int, servers: int = 0) -> float:
    """Predicted samples a second."""
    changes = plait.Changes(settings={"sync": {"servers": servers}} if servers else {})
    found = plait.predict(job(workers), plan, ranks, cluster=CLUSTER, changes=changes)
    return found.prediction.samples_per_s


def exhibit() -> Exhibit:
    lines: dict[str, list[tuple[float, float]]] = {
        "one server": [],
        "four servers": [],
        "all-reduce (ddp)": [],
    }
    for workers in WORKERS:
        lines["one server"].append((float(workers), rate("server-sync", workers + 1, workers, 1)))
        lines["four servers"].append((float(workers), rate("server-sync", workers + 4, workers, 4)))
        lines["all-reduce (ddp)"].append((float(workers), rate("ddp", workers, workers)))
    single = lines["all-reduce (ddp)"][0][1]
    return Exhibit(
        lecture="004",
        title="The server becomes the bottleneck",
        idea="Every worker sends its gradients to the server and fetches weights from it, so the "
        "server's link carries all of it, twice: with enough workers it is what everybody waits for. "
        "All-reduce shares the same work among all links.",
        numbers=[
            Number(what="16 workers, one server: times one worker", ours=lines["one server"][-1][1] / single),
            Number(what="16 workers, four servers", ours=lines["four servers"][-1][1] / single),
            Number(what="16 workers, all-reduce", ours=lines["all-reduce (ddp)"][-1][1] / single),
        ],
        tables=[
            Table(
                title=f"17 million parameters, {PER_WORKER} samples a worker: samples a second, predicted "
                f"on {CLUSTER}",
                columns=["workers", *lines],
                rows=[
                    [w, *(f"{line[at][1]:,.0f}" for line in lines.values())] for at, w in enumerate(WORKERS)
                ],
            )
        ],
        pictures={
            "Samples a second": curves("predicted throughput", lines, x="workers", y="samples/s", log_x=True)
        },
        seen="Predicted by the simulator that prices every plan: a server is a queue with one link. The "
        "lecture's conclusion stands: one server stops scaling; several push the limit out; all-reduce "
        "has none of this kind.",
    )


if __name__ == "__main__":
    show(exhibit())
