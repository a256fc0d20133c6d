"""What pays on slow links, and whether it is predicted: runs on an emulated network between hosts of this machine.

In: a network. Out: a table of each way to train, its step predicted and measured, and its speed as a ratio to plain
ddp on the same network; with `--assert` it exits 1 where a prediction is off by more than 15 %, or what should pay does
not. The machine is measured first (or `--cluster FILE` is read).

    python -m bench.slow_links [--emulate bandwidth=200Mbit,latency=2ms,hosts=2x1] [--steps 30] [--assert]
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from plait.cluster.cluster import Cluster
from plait.cluster.emulated import emulated
from plait.cluster.parse import parse_cluster
from plait.job.job import Job
from plait.options import Changes, Emulation, Saving, Trial
from plait.plan.named import resolve
from plait.run.measure.machine import measure_machine
from plait.run.measure.predict import predict_job
from plait.run.train import train
from plait.units import format_seconds

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {"sync": {"bucket_mib": 1}}),
    "ddp, no overlap": ("ddp", {"sync": {"bucket_mib": 1, "overlap": False}}),
    "ddp, a bucket a tensor": ("ddp", {"sync": {"bucket_mib": 0}}),
    "ddp, two buckets": ("ddp", {"sync": {"bucket_mib": 1024}}),
    "ddp, a bucket a tensor, 3 groups": ("ddp", {"sync": {"bucket_mib": 0}, "links": {"groups": 3}}),
    "ddp, a bucket a tensor, 5 groups": ("ddp", {"sync": {"bucket_mib": 0}, "links": {"groups": 5}}),
    "ddp, bf16": ("ddp", {"sync": {"bucket_mib": 1, "compress": "bf16"}}),
    "zero1": ("zero1", {"sync": {"bucket_mib": 1}}),
    "zero3": ("zero3", {"sync": {"bucket_mib": 1}}),
    "local-sgd, every 8": ("local-sgd", {"average": {"every": 8}}),
    "narrow: ddp": ("ddp", {"sync": {"bucket_mib": 1}}),
    "narrow: ddp, a bucket a tensor": ("ddp", {"sync": {"bucket_mib": 0}}),
}
"""Ways to train, by what people call them; `narrow`: a model of many small layers."""
PAYS = (
    ("ddp", "ddp, no overlap"),
    ("narrow: ddp", "narrow: ddp, a bucket a tensor"),
    ("ddp, bf16", "ddp"),
    ("local-sgd, every 8", "ddp"),
)
"""What is faster on a slow link than what. That sums of single tensors cost more shows where these are many and small:
messages leave one behind the other, so that latency counts once a step, whatever the buckets."""
WIDE, NARROW, BATCH = (512, 8), (64, 64), 256
"""Width and number of layers: 8 MiB of weights, which take 0.34 s at 200 Mbit/s; 130 tensors of 1 MiB together."""
WORST = 0.15
"""What a prediction may be off by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to train."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted_s / self.measured_s - 1


def job(name: str) -> Job:
    """A chain of equal layers."""
    width, count = NARROW if name.startswith("narrow") else WIDE
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(4 * BATCH, width, generator=generator), torch.randint(0, 10, (4 * BATCH,)))

    def model() -> nn.Module:
        layers = [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    return Job(
        model=model, data=data, loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), batch=BATCH, epochs=1,
    )  # fmt: skip


def measure(name: str, emulate: str, ranks: int, steps: int) -> float:
    """Seconds a step, over whole rounds of workers that average now and then."""
    plan, settings = WAYS[name]
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            replace(job(name), epochs=None, steps=steps),
            plan,
            ranks,
            out=Path(folder) / "run",
            changes=Changes(settings=settings),
            saving=Saving(trace=False),
            trial=Trial(emulate=emulate),
        )
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_s"] for line in lines if "step_s" in line][8:]
    if plan != "local-sgd":
        return statistics.median(seconds)
    every = settings["average"]["every"]
    rounds = [sum(seconds[at : at + every]) / every for at in range(0, len(seconds) - every + 1, every)]
    return statistics.median(rounds)


def rows_of(names: list[str], emulate: str, machine: Cluster, steps: int, console: Console) -> list[Row]:
    """Predict, then measure, one after the other."""
    network = Emulation.parse(emulate)
    found = []
    for name in names:
        plan, settings = WAYS[name]
        chosen = resolve(plan, network.ranks, settings)
        predicted = predict_job(job(name), chosen, emulated(machine, network), time_on="cpu")
        measured_s = measure(name, emulate, network.ranks, steps)
        row = Row(name=name, predicted_s=predicted.prediction.step_s, measured_s=measured_s)
        console.print(
            f"{name}: {row.predicted_s:.4f} s predicted, {row.measured_s:.4f} s measured", highlight=False
        )
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--emulate", default="bandwidth=200Mbit,latency=2ms,hosts=2x1")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cluster")
    parser.add_argument("--assert", action="store_true", dest="strict")
    given = parser.parse_args()
    console = Console(width=120)
    machine = (
        parse_cluster(given.cluster) if given.cluster else measure_machine("cpu", lambda event: None).cluster
    )
    rows = rows_of(given.ways, given.emulate, machine, given.steps, console)
    plain = {row.name: row.measured_s for row in rows if row.name in ("ddp", "narrow: ddp")}
    table = Table("way", "predicted", "measured", "error", "speed", title=given.emulate, title_justify="left")
    for row in rows:
        base = plain.get("narrow: ddp" if row.name.startswith("narrow") else "ddp")
        table.add_row(
            row.name, format_seconds(row.predicted_s), format_seconds(row.measured_s), f"{100 * row.error:+.0f} %",
            f"{base / row.measured_s:.2f}x" if base else "",
        )  # fmt: skip
    console.print(table)
    worst = max(abs(row.error) for row in rows)
    bars = [(f"worst prediction off by {100 * worst:.0f} %, at most {100 * WORST:.0f} %", worst <= WORST)]
    by_name = {row.name: row.measured_s for row in rows}
    bars += [
        (
            f"{better} is {by_name[worse] / by_name[better]:.2f}x as fast as {worse}",
            by_name[better] < by_name[worse],
        )
        for better, worse in PAYS
        if {better, worse} <= by_name.keys()
    ]
    for what, holds in bars:
        console.print(f"{what}: {'ok' if holds else 'MISSED'}", highlight=False)
    if given.strict and not all(holds for _, holds in bars):
        sys.exit(1)


if __name__ == "__main__":
    main()
