"""Does training without flushes reach what synchronous training reaches? Two real tasks, both ways.

    python -m bench.pipedream [--tasks digits clothing] [--stages 4] [--seeds 0 1 2] [--assert]

As many updates of as many samples each, at the same learning rates: `1f1b` makes one a step, `pipedream` one for every
micro-batch of a round. Rates fall to 0, so that accuracies have come to rest when they are compared. Printed: held-out
accuracy and time of both, and for each stage of `pipedream` how stale its gradients are and what it keeps of older
weights, read off the program. With --assert, exits 1 where a seed differs by more than 1 point.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from examples.alexnet_fashion import accuracy, fashion
from examples.digits_mlp import digits
from torch import nn
from torch.utils.data import TensorDataset

import plait
from plait.plan.named import resolve
from plait.program.stage.versions import StageVersions, stage_versions
from plait.run.prepare.prepare import prepare
from plait.units import format_bytes

ROUND, PARTS = 14, 5
"""Updates of a round; micro-batches of a synchronous step."""
POINT = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained."""

    model: Callable[[], nn.Module]
    data: Callable[..., TensorDataset]
    """Takes `held_out`."""
    samples: int
    """Of an update."""
    epochs: int
    rate: float
    """The first learning rate of SGD."""


def lenet() -> nn.Module:
    """Two convolutions, two products."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def perceptron() -> nn.Module:
    """Four products."""
    sizes = (64, 128, 128, 128)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "digits": Task(model=perceptron, data=digits, samples=32, epochs=60, rate=0.1),
        "clothing": Task(model=lenet, data=fashion, samples=50, epochs=20, rate=0.05),
    }
)
"""359 held-out images of handwriting, 1,000 of clothing. The rates are small, so that two runs with the same seed stay
near each other: with Adam at 1e-3, or momentum, two runs differ by more than a point however they are trained."""


def main() -> int:
    options = _options()
    met = True
    for name in options.tasks:
        met &= _compare(name, TASKS[name], options.stages, options.seeds)
    return 1 if options.check and not met else 0


def _compare(name: str, task: Task, stages: int, seeds: list[int]) -> bool:
    count = len(task.data())
    print(f"{name}: {count} samples, {task.epochs} epochs of updates of {task.samples}, {stages} stages")
    differences = []
    for seed in seeds:
        found = {}
        for plan, batch, parts in (
            ("1f1b", task.samples, PARTS),
            ("pipedream", task.samples * ROUND, ROUND),
        ):
            began = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch:
                own = _job(task, batch, parts, count, seed)
                result = plait.train(
                    own, plan, stages, out=Path(scratch) / "run", saving=plait.Saving(trace=False)
                )
            found[plan] = result.evaluation["accuracy"]
            print(
                f"seed {seed}  {plan:<9}  accuracy {found[plan]:.4f}  last loss {result.losses[-1]:.3f}  "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
        differences.append(found["pipedream"] - found["1f1b"])
        print(f"seed {seed}  difference {100 * differences[-1]:+.2f} points", flush=True)
    mean, most = statistics.fmean(differences), max(differences, key=abs)
    met = abs(most) <= POINT
    print(
        f"{name}: difference {100 * mean:+.2f} points on average, at most {100 * most:+.2f} "
        f"(bar: 1 point on every seed, {'ok' if met else 'MISSED'})"
    )
    for entry in _versions(task, stages, count):
        print(
            f"stage {entry.stage}: gradients on weights up to {entry.staleness} updates old; "
            f"{entry.stashes} older versions kept, {format_bytes(entry.num_bytes)}",
            flush=True,
        )
    return met


def _job(task: Task, batch: int, micro_batches: int, count: int, seed: int) -> plait.Job:
    steps = task.epochs * -(-count // batch)
    return plait.Job(
        model=task.model,
        data=task.data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=task.rate),
        schedule=lambda step: task.rate * (1 - step / steps),
        batch=batch,
        accumulate=micro_batches,
        steps=steps,
        evaluate=partial(task.data, held_out=True),
        metrics={"accuracy": accuracy},
        seed=seed,
    )


def _versions(task: Task, stages: int, count: int) -> tuple[StageVersions, ...]:
    own = _job(task, task.samples * ROUND, ROUND, count, 0)
    programs = prepare(own, resolve("pipedream", stages), "cpu", torch.float32, lambda event: None)
    return stage_versions(programs.for_sizes([(task.samples,)] * ROUND))


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--assert", dest="check", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
