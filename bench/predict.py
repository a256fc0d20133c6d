"""Predict, then measure, on this machine: step time and peak memory of each model under each plan.

In: which models, plans and ranks. Out: a table of predicted and measured, and the bars with `ok` or `MISSED`; with
`--assert` it exits 1 where one is missed. The machine is measured first (or `--cluster FILE` is read), then the ops,
updates and exchanges of each program are timed by themselves; the step is what the simulator makes of them. Every run
that is measured is a process of its own.

    python -m bench.predict [--models mlp gpt] [--plans ddp 1f1b] [--ranks 2] [--steps 40] [--json FILE] [--assert]
    python -m bench.predict --device cuda
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.predict_cases import MODELS, PLANS, Entry, gpu_entries, processor_entries
from plait.cluster.cluster import Cluster
from plait.cluster.parse import parse_cluster
from plait.options import Changes, Saving
from plait.plan.named import resolve
from plait.run.measure.machine import measure_machine
from plait.run.measure.predict import predict_job
from plait.run.measure.tiny import Overhead, measure_overhead
from plait.run.parallelize import parallelize
from plait.run.train import train
from plait.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One plan of one model."""

    model: str
    plan: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Of the step time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Of the peak."""
        return self.predicted_bytes / self.measured_bytes - 1


@cache
def overhead_of_one() -> Overhead:
    """Of a run in one process: it is not forked, and counts the libraries as its own."""
    return measure_overhead(1)


def predict(entry: Entry, cluster: Cluster) -> tuple[float, float, Cluster]:
    """(seconds a step, bytes, the cluster with what was timed for it)."""
    if entry.device == "cpu" and entry.ranks == 1:
        constants = replace(
            cluster.device.calibration,
            step_s=overhead_of_one().step_s,
            reserve_bytes=float(overhead_of_one().memory_bytes),
        )
        alone = replace(cluster, device=replace(cluster.device, calibration=constants))
        seconds, num_bytes, found = _predict(entry, alone)
        return seconds, num_bytes, replace(cluster, device=replace(cluster.device, timed=found.device.timed))
    return _predict(entry, cluster)


def _predict(entry: Entry, cluster: Cluster) -> tuple[float, float, Cluster]:
    plan = resolve(entry.plan if entry.device == "cpu" else "single", entry.ranks, entry.settings)
    found = predict_job(entry.job(), plan, cluster, time_on=entry.device)
    memory = found.exact.prediction.memory
    # What torch counts on a GPU is tensors; on a processor the system counts the whole process.
    total = memory.total - memory.overhead if entry.device == "cuda" else memory.total
    return found.exact.prediction.step_s, total, found.cluster


def measure(entry: Entry, steps: int) -> tuple[float, float]:
    """(seconds a step, peak bytes) of a run in a process of its own."""
    given = json.dumps(asdict(entry) | {"settings": dict(entry.settings)})
    command = [sys.executable, "-m", "bench.predict", "--one", given, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{entry.name} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["step_s"], found["memory_bytes"]


def run_one(entry: Entry, steps: int) -> dict[str, float]:
    """What that process does."""
    job = entry.job()
    if entry.device == "cuda":
        return _run_on_gpu(entry, steps)
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, epochs=None, steps=steps)
        result = train(
            job,
            entry.plan,
            entry.ranks,
            out=Path(folder) / "run",
            changes=Changes(settings=entry.settings),
            saving=Saving(trace=False),
        )
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_s"] for line in lines if "step_s" in line]
    return {"step_s": statistics.median(seconds[5:]), "memory_bytes": lines[-1]["memory_bytes"]}


def _run_on_gpu(entry: Entry, steps: int) -> dict[str, float]:
    job = entry.job()
    step = parallelize(job, "single", device="cuda", settings=entry.settings)
    data: Any = job.data() if callable(job.data) else job.data
    if isinstance(data, tuple):
        batch = tuple(column[: job.batch].cuda() for column in data)
    else:
        samples = [data[index] for index in range(job.batch)]
        batch = tuple(torch.stack(column).cuda() for column in zip(*samples, strict=True))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - began)
    return {"step_s": statistics.median(seconds[3:]), "memory_bytes": torch.cuda.max_memory_allocated()}


def bars(rows: list[Row], device: str) -> list[tuple[str, float, float]]:
    """(what, value, most) in percent."""
    errors = [abs(row.error) for row in rows]
    memory = [abs(row.memory_error) for row in rows]
    found = [("step time, median error", statistics.median(errors), 0.08 if device == "cuda" else 0.10)]
    if device == "cuda":
        return [*found, ("peak memory, worst error", max(memory), 0.05)]
    found += [("step time, worst error", max(errors), 0.25), ("peak memory, worst error", max(memory), 0.10)]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        chosen = min(own, key=lambda row: row.predicted_s)
        best = min(row.measured_s for row in own)
        found.append(
            (f"{model}: {chosen.plan} is chosen, slower than the best by", chosen.measured_s / best - 1, 0.10)
        )
    return found


def show(rows: list[Row], found: list[tuple[str, float, float]], console: Console) -> None:
    """Tables for people."""
    table = Table("model", "plan", "predicted", "measured", "error", "memory predicted", "measured", "error")
    for row in rows:
        table.add_row(
            row.model, row.plan, format_seconds(row.predicted_s), format_seconds(row.measured_s),
            f"{100 * row.error:+.1f} %", format_bytes(row.predicted_bytes), format_bytes(row.measured_bytes),
            f"{100 * row.memory_error:+.1f} %",
        )  # fmt: skip
    console.print(table)
    for what, value, most in found:
        verdict = "ok" if value <= most else "MISSED"
        console.print(f"{what}: {100 * value:.1f} %, at most {100 * most:.0f} %: {verdict}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cluster")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--assert", action="store_true", dest="strict")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(Entry(**json.loads(given.one)), given.steps)))
        return
    console = Console(width=160)
    cluster = _cluster(given, console)
    if given.device == "cuda":
        entries = [
            entry for entry in gpu_entries() if entry.model in given.models or given.models == list(MODELS)
        ]
    else:
        entries = processor_entries(tuple(given.models), tuple(given.plans), given.ranks)
    rows = []
    for entry in entries:
        predicted_s, predicted_bytes, cluster = predict(entry, cluster)
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
        measured_s, measured_bytes = measure(entry, given.steps)
        row = Row(
            model=entry.model, plan=entry.plan, predicted_s=predicted_s, measured_s=measured_s,
            predicted_bytes=predicted_bytes, measured_bytes=measured_bytes,
        )  # fmt: skip
        rows.append(row)
        console.print(
            f"{entry.name}: {format_seconds(predicted_s)} predicted, {format_seconds(measured_s)} measured;"
            f" {format_bytes(predicted_bytes)} of {format_bytes(measured_bytes)}",
            highlight=False,
        )
    found = bars(rows, given.device)
    show(rows, found, console)
    if given.json:
        given.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "bars": found}))
    if given.strict and any(value > most for _, value, most in found):
        sys.exit(1)


def _cluster(given: argparse.Namespace, console: Console) -> Cluster:
    if given.cluster:
        return parse_cluster(given.cluster)
    measured = measure_machine(
        given.device, lambda event: console.print(event.get("stage", ""), highlight=False)
    )
    if measured.notes["notice"]:
        console.print(f"notice: {measured.notes['notice']}", highlight=False)
    return measured.cluster


if __name__ == "__main__":
    main()
