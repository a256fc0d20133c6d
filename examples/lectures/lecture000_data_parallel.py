"""DataParallel beside DDP, lecture 000: threads that copy the model every step, and where their time goes.

python -m examples.lectures.lecture000_data_parallel
"""

import copy
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import bars
from examples.lectures.runs import trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait
from plait.report.breakdown import breakdown

WIDTH, BATCH, STEPS, REPLICAS = 1024, 64, 12, 2


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
    )


def job() -> plait.Job:
    return plait.Job(
        model=network,
        data=samples,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch=BATCH,
        steps=STEPS,
        shuffle=False,
    )


class Threads:
    """What torch.nn.DataParallel does for GPUs, on threads of this process; its phases are timed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def step(self, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> float:
        """One step: the inputs go out, the model goes out, the outputs come back, the gradients come back."""
        optimizer.zero_grad()
        with self.timed("scatter"):
            shares = list(zip(x.chunk(REPLICAS), y.chunk(REPLICAS), strict=True))
        with self.timed("replicate"):
            replicas = [copy.deepcopy(self.model) for _ in shares]
        outputs: list[Tensor] = [x] * REPLICAS

        def forward(at: int) -> None:
            outputs[at] = replicas[at](shares[at][0])

        with self.timed("forward on threads"):
            workers = [threading.Thread(target=forward, args=(at,)) for at in range(REPLICAS)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        with self.timed("gather"):
            gathered = torch.cat(outputs)
        with self.timed("loss and backward"):
            loss = nn.functional.cross_entropy(gathered, y)
            loss.backward()
        with self.timed("reduce"):
            for own, *others in zip(
                self.model.parameters(), *(one.parameters() for one in replicas), strict=True
            ):
                own.grad = sum((other.grad for other in others[1:]), start=others[0].grad)
        with self.timed("update"):
            optimizer.step()
        return loss.item()


def by_threads() -> tuple[dict[str, float], list[float]]:
    """Milliseconds of each phase, and the losses."""
    given = job()
    model = given.build_model()
    threads = Threads(model)
    optimizer = given.build_optimizer(list(model.named_parameters()))
    x, y = samples().tensors
    losses = [threads.step(x, y, optimizer) for _ in range(STEPS)]
    return {name: 1e3 * statistics.median(found[2:]) for name, found in threads.seconds.items()}, losses


def by_ddp() -> tuple[dict[str, float], list[float]]:
    with trained(replace(job(), steps=STEPS), "ddp", REPLICAS) as result:
        trace = plait.read_run(result.folder).trace
        losses = list(result.losses)
    assert trace is not None
    parts = breakdown(trace)
    names = {
        "forward": "forward_s",
        "backward": "backward_s",
        "exposed communication": "exposed_communication_s",
    }
    names |= {"update": "update_s", "other": "other_s", "waiting": "idle_s"}
    return {
        name: 1e3 * sum(getattr(p, field) for p in parts) / len(parts) for name, field in names.items()
    }, losses


def exhibit() -> Exhibit:
    (threads, first), (ddp, second) = by_threads(), by_ddp()
    apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
    moved = threads["scatter"] + threads["replicate"] + threads["gather"] + threads["reduce"]
    return Exhibit(
        lecture="000",
        title="DataParallel beside DistributedDataParallel",
        idea="DataParallel is the simplest form: one process, a thread a device. Every step it scatters "
        "the inputs, copies the model to all devices, gathers the outputs and reduces the gradients: "
        "slower, says the lecture, because it communicates three times a step. DistributedDataParallel "
        "keeps a copy in every process and sends gradients only.",
        numbers=[
            Number(what="largest difference of losses", ours=f"{apart:.1e}"),
            Number(what="a step by threads, ms", ours=sum(threads.values())),
            Number(what="of which moves data and weights", ours=moved / sum(threads.values())),
            Number(what="a step by ddp, ms", ours=sum(ddp.values())),
            Number(
                what="speed of ddp to threads",
                lecture="faster",
                ours=sum(threads.values()) / sum(ddp.values()),
            ),
        ],
        tables=[
            Table(
                title="Threads of one process",
                columns=["phase", "ms"],
                rows=[[k, f"{v:.2f}"] for k, v in threads.items()],
            ),
            Table(
                title="ddp on two processes",
                columns=["phase", "ms"],
                rows=[[k, f"{v:.2f}"] for k, v in ddp.items()],
            ),
        ],
        pictures={"A step": bars("one step of 64 samples", {"threads": threads, "ddp": ddp}, unit="ms")},
        seen="Both train the same thing. The threads are written out in the exhibit, after "
        "torch.nn.DataParallel, which takes GPUs only; one backward runs through all replicas in one "
        "process. plait offers no plan of threads.",
    )


if __name__ == "__main__":
    show(exhibit())
