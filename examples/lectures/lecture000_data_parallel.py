"""DataParallel beside DDP, lecture 000: threads that copy the model every step, and where their time goes.

python -m examples.lectures.lecture000_data_parallel
"""

import os
import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import bars, timeline
from examples.lectures.runs import trained
from torch import nn
from torch.utils.data import TensorDataset

import plait
from plait.trace.span import Span, Trace

BATCH, STEPS, REPLICAS = 64, 12, 2
WIDE, DEEP = (1024, 2), (32, 60)
"""Two networks, by width and layers: one of large products, one of many small ones."""
CLUSTER = "1x8xV100"


def network(width: int, layers: int) -> nn.Module:
    body = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 10))


def job(width: int = WIDE[0], layers: int = WIDE[1]) -> plait.Job:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH, width, generator=generator)
    classes = torch.randint(0, 10, (BATCH,), generator=generator)
    return plait.Job(
        model=lambda: network(width, layers),
        data=TensorDataset(inputs, classes),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch=BATCH,
        steps=STEPS,
        shuffle=False,
    )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a run showed."""

    trace: Trace
    losses: list[float]

    def parts(self, rank: int = 0) -> dict[str, float]:
        """Milliseconds of each part of a step, the median over steps; the first two are warm-up."""
        found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for span in self.trace.spans:
            if span.rank == rank and span.lane == "compute" and span.step >= 2 and span.kind != "checkpoint":
                found[part_of(span)][span.step] += 1e3 * (span.end_s - span.start_s)
        return {name: statistics.median(by_step.values()) for name, by_step in found.items()}

    def step_ms(self) -> float:
        """From the end of one step to the end of the next, the median."""
        spans = [span for span in self.trace.spans if span.kind != "checkpoint"]
        ends = [max(s.end_s for s in spans if s.step == step) for step in range(1, STEPS)]
        return 1e3 * statistics.median(b - a for a, b in pairwise(ends))

    def sent_bytes(self, word: str) -> int:
        """Bytes of a step's communication of a name."""
        spans = [s for s in self.trace.spans if s.step == STEPS - 1 and s.rank == 0 and word in s.name]
        return sum(span.num_bytes for span in spans)


def part_of(span: Span) -> str:
    """The lecture's word for an instruction."""
    words = {"scatter": "scatter", "flatten": "replicate", "replicate": "replicate", "take": "replicate"}
    words |= {"gather": "gather", "all_reduce": "waits for sums", "reduce": "reduce"}
    named = span.name.removeprefix("start ").removeprefix("wait for ")
    kinds = {"wait": "waits for sums", "data": "data", "host": "other"}
    return words.get(named.split()[0], kinds.get(span.kind, span.kind))


def run(plan: str, width: int = WIDE[0], layers: int = WIDE[1]) -> Steps:
    with trained(job(width, layers), plan, REPLICAS) as result:
        trace = plait.read_run(result.folder).trace
        assert trace is not None
        return Steps(trace=trace, losses=list(result.losses))


def predicted_ms(plan: str) -> float:
    return 1e3 * plait.predict(job(), plan, 8, cluster=CLUSTER).prediction.step_s


def exhibit() -> Exhibit:
    threads, ddp = run("threads"), run("ddp")
    deep_threads, deep_ddp = run("threads", *DEEP), run("ddp", *DEEP)
    apart = max(abs(a - b) for a, b in zip(threads.losses, ddp.losses, strict=True))
    first, second, own = threads.parts(0), threads.parts(1), ddp.parts(0)
    moved = sum(first.get(name, 0.0) for name in ("scatter", "replicate", "gather", "reduce"))
    rows = {"threads, first": first, "threads, second": second, "ddp": own}
    names = dict.fromkeys(name for parts in rows.values() for name in parts)
    mib = {
        word: run_.sent_bytes(word) / 2**20 for word, run_ in (("replicate ", threads), ("reduce", threads))
    }
    sums = sum(s.num_bytes for s in ddp.trace.spans if s.rank == 0 and s.step == STEPS - 1) / 2**20
    return Exhibit(
        lecture="000",
        title="DataParallel beside DistributedDataParallel",
        idea="DataParallel is the simplest form: one process, a thread a device. Every step it scatters "
        "the inputs, copies the model to all devices, gathers what they say and reduces the gradients: "
        "slower, says the lecture, because it communicates three times a step. DistributedDataParallel "
        "keeps a copy in every process and sends gradients only.",
        numbers=[
            Number(what="largest difference of losses", ours=f"{apart:.1e}"),
            Number(what="a step by threads, ms", ours=threads.step_ms()),
            Number(
                what="of which the first replica moves data and weights", ours=moved / sum(first.values())
            ),
            Number(what="a step by ddp, ms", ours=ddp.step_ms()),
            Number(what="speed of ddp to threads", lecture="faster", ours=threads.step_ms() / ddp.step_ms()),
            Number(
                what="the same, 60 small layers: the interpreter's lock",
                lecture="faster",
                ours=deep_threads.step_ms() / deep_ddp.step_ms(),
            ),
            Number(
                what=f"predicted for {CLUSTER}",
                lecture="faster",
                ours=predicted_ms("threads") / predicted_ms("ddp"),
            ),
            Number(
                what=f"load of the machine meanwhile, {os.cpu_count()} cores",
                ours=round(os.getloadavg()[0]),
                note="over the number of cores, ddp's processes wait for others' work, and times say little",
            ),
        ],
        tables=[
            Table(
                title="Where a step goes, ms",
                columns=["part", *rows],
                rows=[
                    [name, *(f"{parts[name]:.2f}" if name in parts else "" for parts in rows.values())]
                    for name in names
                ],
            ),
            Table(
                title="Why ddp is faster",
                columns=["", "threads", "ddp"],
                rows=[
                    ["weights that travel every step, MiB", f"{mib['replicate ']:.1f}", "none"],
                    [
                        "gradients that travel, MiB",
                        f"{mib['reduce']:.1f} to one replica",
                        f"{sums:.1f} summed by all",
                    ],
                    ["while the backward runs", "no", "yes"],
                    ["who updates", "the first; the others wait", "all, each its copy"],
                    ["Python interpreters", "1 for all replicas", "1 a replica"],
                    [
                        "a step of 60 small layers, ms",
                        f"{deep_threads.step_ms():.1f}",
                        f"{deep_ddp.step_ms():.1f}",
                    ],
                ],
            ),
        ],
        pictures={
            "A step": bars("one step of 64 samples", rows, unit="ms"),
            "A step of two threads: scatter, replicate, gather and reduce are instructions": timeline(
                "threads", threads.trace, STEPS - 1
            ),
        },
        seen="Both train the same thing: `plait run JOB --plan threads --ranks 2` is DataParallel, and `plait verify` "
        "proves it like any plan. What is gathered are the losses of the replicas, which compute their own; "
        "the table has medians of 10 steps.",
    )


if __name__ == "__main__":
    show(exhibit())
