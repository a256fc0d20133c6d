"""Do workers that do not wait train as well, and how much faster with a straggler? Two real tasks under every rule.

    python -m bench.relaxed [--tasks clothing verses] [--workers 4] [--slow 3] [--seeds 0 1] [--json FILE] [--assert]
    python -m bench.relaxed --scaling        hogwild with two workers and with one, nothing slowed

Every plan gets as many epochs over the same data, at learning rates that fall to 0: that of ddp, or less where a
worker's share of the batch is an update. Processes have one thread each. Each plan runs as it is, then with one worker
that takes `--slow` times as long to compute. Printed: samples/s of the steps after the first ones, how far the
simulator's prediction with the straggler is off, which it makes from the trace of the run without; time of all steps up
to the target accuracy, updates/s, bytes that a worker sends a step, staleness, held-out accuracy and loss.
`--keep FOLDER` keeps the runs there, and reads those that it finds there instead of training again.

Bars (with --assert, exit 1): with the straggler, server-async and easgd reach 1.5 times the samples/s of ddp; every
plan's accuracy is within 1 point of ddp's (means over seeds); the prediction is within 15 %; two workers of hogwild
reach 1.6 times the samples/s of one, at a test loss within 1 %.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from examples.alexnet_fashion import accuracy, fashion
from examples.sparse_verses import LogisticRegression, verses
from examples.sparse_verses import accuracy as right_verses
from torch import nn

import plait
from bench.relaxed_prediction import predicted_samples_per_s
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.report.record import RunRecord, read_run
from plait.report.traffic import traffic_of
from plait.units import format_bytes

POINT, STRAGGLER_BAR, SCALING_BAR, LOSS_BAR, PREDICTION_BAR = 0.01, 1.5, 1.6, 0.01, 0.15
_WARM_UP = 5
"""Steps at the start that do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained."""

    model: Callable[[], nn.Module]
    data: Callable[..., Any]
    """Takes `held_out`."""
    loss: nn.Module
    metric: Callable[..., torch.Tensor]
    batch: int
    """Samples that all workers together take a step."""
    epochs: int
    rate: float
    """The first learning rate of ddp."""
    optimizer: type[torch.optim.Optimizer]
    target: float
    """The accuracy to reach."""


def lenet() -> nn.Module:
    """Two convolutions, two products."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "clothing": Task(
            model=lenet, data=fashion, loss=nn.CrossEntropyLoss(), metric=accuracy, batch=64, epochs=20, rate=1e-3,
            optimizer=torch.optim.Adam, target=0.84,
        ),
        "verses": Task(
            model=LogisticRegression, data=verses, loss=nn.BCEWithLogitsLoss(), metric=right_verses, batch=256,
            epochs=12, rate=0.8, optimizer=torch.optim.SGD, target=0.87,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train."""

    plan: str
    settings: Mapping[str, Any]
    factor: str
    """Of the rate: `whole`, as ddp; `share`, where a worker's share of the batch is an update: divided by the number of
    workers, or by its root for Adam, whose steps are as long whatever the batch."""
    pull: float = 0.0
    """Of easgd: how far a worker and the center move to each other at first, the learning rate times rho."""


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "ddp": Way(plan="ddp", settings={}, factor="whole"),
        "ddp fp16": Way(plan="ddp", settings={"sync": {"compress": "fp16"}}, factor="whole"),
        "ddp powersgd": Way(plan="ddp", settings={"sync": {"compress": "powersgd"}}, factor="whole"),
        "ddp topk": Way(plan="ddp", settings={"sync": {"compress": "topk"}}, factor="whole"),
        "server-sync": Way(plan="server-sync", settings={}, factor="whole"),
        "server-stale": Way(plan="server-stale", settings={}, factor="whole"),
        "server-async": Way(plan="server-async", settings={}, factor="share"),
        "easgd": Way(plan="easgd", settings={}, factor="whole", pull=0.4),
        "local-sgd": Way(plan="local-sgd", settings={}, factor="whole"),
        "diloco": Way(plan="diloco", settings={"average": {"every": 20}}, factor="whole"),
        "hogwild": Way(plan="hogwild", settings={}, factor="share"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run."""

    samples_per_s: float
    predicted: float | None
    """Samples a second that the simulator expects."""
    to_target_s: float | None
    updates_per_s: float
    bytes_per_step: float
    staleness: Mapping[int, int]
    accuracy: float
    loss: float


def main() -> int:
    options = _options()
    with ExitStack() as stack:
        if options.keep is None:
            options.keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-bench-")))
        stack.enter_context(patch("os.cpu_count", return_value=1))  # by which train gives threads to ranks
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Everything that was asked for."""
    torch.set_num_threads(1)
    met = True
    told: dict[str, Any] = {}
    if options.scaling:
        met, told = scaling(options.seeds, options.keep)
    for name in options.tasks if not options.scaling else ():
        fine, told[name] = compare(name, options)
        met &= fine
    if options.json:
        Path(options.json).write_text(json.dumps(told, indent=1))
    return 1 if options.check and not met else 0


def compare(name: str, options: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """All ways on one task, without and with a straggler."""
    task, slow = TASKS[name], {options.workers - 1: options.slow}
    size = len(task.data())
    print(
        f"{name}: {size} samples, {task.epochs} epochs of steps of {task.batch} on {options.workers} workers"
    )
    print(f"{'':13} {'':9} {'samples/s':>9} {'predicted':>9} {'to target':>9} {'updates/s':>9} {'bytes/step':>10} "
          f"{'staleness':>14} {'accuracy':>8} {'test loss':>9}")  # fmt: skip
    found: dict[str, list[list[Outcome]]] = {}
    for way in options.ways:
        found[way] = []
        for seed in options.seeds:
            folder = options.keep / f"{name}-{way.replace(' ', '-')}-{seed}"
            even = run(task, WAYS[way], options.workers, seed, folder / "even", {})
            late = run(task, WAYS[way], options.workers, seed, folder / "late", slow)
            job, plan = (
                job_of(task, WAYS[way], options.workers, seed),
                plan_of(task, WAYS[way], options.workers),
            )
            late = replace(late, predicted=predicted_samples_per_s(job, plan, folder / "even", slow))
            found[way].append([even, late])
        for index, label in enumerate(("even", "straggler")):
            print(_row(way, label, [pair[index] for pair in found[way]]), flush=True)
    told = {way: [[asdict(one) for one in pair] for pair in pairs] for way, pairs in found.items()}
    return _judge(found), told


def run(task: Task, way: Way, workers: int, seed: int, folder: Path, slow: Mapping[int, float]) -> Outcome:
    """One run, or what is left of it where it was kept."""
    if not (folder / "totals.json").exists():
        job = job_of(task, way, workers, seed)
        if (
            plait.train(job, plan_of(task, way, workers), out=folder, trial=plait.Trial(slow=slow)).stopped
            is not None
        ):
            raise KeyboardInterrupt
        shutil.rmtree(folder / "checkpoints")
        (folder / "trace" / "trace.json").unlink()
    record = read_run(folder)
    traffic = traffic_of(record)
    last = record.evaluations[-1]["evaluate"]
    return Outcome(
        samples_per_s=samples_per_s(record.metrics),
        predicted=None,
        to_target_s=_seconds_to(task.target, record),
        updates_per_s=traffic.updates_per_s or 0.0,
        bytes_per_step=traffic.bytes_per_step or 0.0,
        staleness=dict(traffic.staleness),
        accuracy=float(last["accuracy"]),
        loss=float(last["loss"]),
    )


def _seconds_to(target: float, record: RunRecord) -> float | None:
    """Time of all steps up to the evaluation that reached the target, but the first one's, which starts processes."""
    for line in record.evaluations:
        if line["evaluate"]["accuracy"] >= target:
            return sum(one["step_s"] for one in record.metrics if 0 < one["step"] <= line["step"])
    return None


def plan_of(task: Task, way: Way, workers: int) -> Plan:
    """The plan with so many workers, whatever servers it needs beside them."""
    settings = {"elastic": {"rho": way.pull / task.rate}} if way.pull else way.settings
    servers = resolve(way.plan, 2, settings).sync.servers
    return resolve(way.plan, workers + servers, settings)


def job_of(task: Task, way: Way, workers: int, seed: int) -> plait.Job:
    """The task at the way's learning rate, which falls to 0."""
    power = 0.5 if task.optimizer is torch.optim.Adam else 1.0
    rate = task.rate / (workers**power if way.factor == "share" else 1)
    steps = task.epochs * -(-len(task.data()) // task.batch)
    return plait.Job(
        model=task.model,
        data=task.data,
        loss=task.loss,
        optimizer=lambda parameters: task.optimizer(parameters, lr=rate),  # type: ignore[call-arg]
        schedule=lambda step: rate * max(0.0, 1 - step / steps),
        batch=task.batch,
        epochs=task.epochs,
        seed=seed,
        evaluate=lambda: task.data(held_out=True),
        evaluate_every=2 * steps // task.epochs,
        metrics={"accuracy": task.metric},
    )


def samples_per_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """Of the steps after the first ones, evaluations left out."""
    counted = lines[_WARM_UP:]
    return sum(line["samples_per_s"] * line["step_s"] for line in counted) / sum(
        line["step_s"] for line in counted
    )


def scaling(seeds: Sequence[int], keep: Path) -> tuple[bool, dict[str, Any]]:
    """Two workers of hogwild against one, in turns; each worker's step has as many samples."""
    task, met, told = TASKS["verses"], True, {}
    ratios, losses = [], []
    for seed in seeds:
        found = []
        for workers in (1, 2):
            way = WAYS["hogwild"]
            sized = replace(task, batch=64 * workers, rate=0.2 * workers)
            found.append(run(sized, way, workers, seed, keep / f"scaling-{workers}-{seed}", {}))
        ratios.append(found[1].samples_per_s / found[0].samples_per_s)
        losses.append(found[1].loss / found[0].loss - 1)
        one, two = found
        print(f"seed {seed}: one worker {one.samples_per_s:,.0f} samples/s, two {two.samples_per_s:,.0f}: "
              f"{ratios[-1]:.2f} times; test loss {one.loss:.4f} and {two.loss:.4f} ({losses[-1]:+.2%})")  # fmt: skip
        told[str(seed)] = [asdict(each) for each in found]
    met = statistics.median(ratios) >= SCALING_BAR and abs(statistics.mean(losses)) <= LOSS_BAR
    print(f"hogwild: {statistics.median(ratios):.2f} times the samples/s of one worker (bar {SCALING_BAR}), test loss "
          f"{statistics.mean(losses):+.2%} (bar {LOSS_BAR:.0%}): {'met' if met else 'MISSED'}")  # fmt: skip
    return met, told


def _row(way: str, label: str, runs: list[Outcome]) -> str:
    times = [run.to_target_s for run in runs]
    predicted = [run.predicted / run.samples_per_s for run in runs if run.predicted is not None]
    ages: dict[int, int] = {}
    for run in runs:
        for age, count in run.staleness.items():
            ages[age] = ages.get(age, 0) + count
    total = sum(ages.values())
    stale = f"{sum(a * c for a, c in ages.items()) / total:.2f}, max {max(ages)}" if total else ""
    reached = f"{statistics.mean(t for t in times if t is not None):.2f} s" if None not in times else "not"
    guess = f"{statistics.mean(predicted) - 1:+.0%}" if predicted else ""

    def mean(field: str) -> float:
        return statistics.mean(getattr(run, field) for run in runs)

    return (
        f"{way:13} {label:9} {mean('samples_per_s'):9,.0f} {guess:>9} {reached:>9} {mean('updates_per_s'):9,.0f} "
        f"{format_bytes(mean('bytes_per_step')):>10} {stale:>14} {mean('accuracy'):8.2%} {mean('loss'):9.4f}"
    )


def _judge(found: Mapping[str, list[list[Outcome]]]) -> bool:
    """Say which bars were met."""
    met = True

    def mean(way: str, index: int, field: str) -> float:
        return statistics.mean(getattr(pair[index], field) for pair in found[way])

    if "ddp" not in found:
        return met
    for way in found:
        if way in ("server-async", "easgd"):
            ratio = mean(way, 1, "samples_per_s") / mean("ddp", 1, "samples_per_s")
            met &= ratio >= STRAGGLER_BAR
            print(f"with the straggler, {way} reaches {ratio:.2f} times the samples/s of ddp (bar {STRAGGLER_BAR}): "
                  f"{'met' if ratio >= STRAGGLER_BAR else 'MISSED'}")  # fmt: skip
        for index, label in enumerate(("even", "straggler")):
            lost = mean("ddp", index, "accuracy") - mean(way, index, "accuracy")
            if lost > POINT:
                met = False
                print(f"{way}, {label}: {lost:.2%} less accurate than ddp (bar {POINT:.0%}): MISSED")
        off = [pair[1].predicted / pair[1].samples_per_s - 1 for pair in found[way] if pair[1].predicted]
        if off and abs(statistics.mean(off)) > PREDICTION_BAR:
            met = False
            print(f"{way}: predicted {statistics.mean(off):+.0%} off (bar {PREDICTION_BAR:.0%}): MISSED")
    return met


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json")
    parser.add_argument("--assert", action="store_true", dest="check")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
