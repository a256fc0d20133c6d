"""Does training without flushes reach what synchronous training reaches? A LeNet on Fashion-MNIST, both ways.

    python -m bench.pipedream --stages 4 --epochs 20

As many updates of as many samples each, at the same learning rates: `1f1b` makes one a step, `pipedream` one for every
micro-batch of a round. Printed: held-out accuracy and time of both, and for each stage of `pipedream` how stale its
gradients are and what it keeps of older weights, read off the program. One run on 1,000 held-out images is off by a
point by itself, so the mean over seeds is what counts; with --assert, exits 1 where it differs by more than 1 point.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from examples.alexnet_fashion import accuracy, fashion
from torch import nn

import plait
from plait.plan.named import resolve
from plait.program.versions import StageVersions, stage_versions
from plait.run.prepare import prepare
from plait.units import format_bytes

SAMPLES, ROUND, PARTS, RATE = 50, 14, 5, 1e-3
"""Samples of an update, updates of a round, micro-batches of a synchronous step, first learning rate."""
POINT = 0.01


def main() -> int:
    options = _options()
    count = len(fashion())
    print(f"{count} images, {options.epochs} epochs, {options.stages} stages, seeds {options.seeds}")
    differences = []
    for seed in options.seeds:
        found = {}
        for plan, batch, parts in (("1f1b", SAMPLES, PARTS), ("pipedream", SAMPLES * ROUND, ROUND)):
            own = _job(batch, parts, options.epochs, count, seed)
            began = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch:
                result = plait.train(own, plan, options.stages, out=Path(scratch) / "run", trace=False)
            found[plan] = result.evaluation["accuracy"]
            print(
                f"seed {seed}  {plan:<9}  accuracy {found[plan]:.4f}  last loss {result.losses[-1]:.3f}  "
                f"{time.perf_counter() - began:.0f} s"
            )
        differences.append(found["pipedream"] - found["1f1b"])
        print(f"seed {seed}  difference {100 * differences[-1]:+.2f} points")
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    print(f"mean difference {100 * mean:+.2f} points, standard error {100 * error:.2f}")
    for entry in _versions(options.stages, _job(SAMPLES * ROUND, ROUND, options.epochs, count, 0)):
        print(
            f"stage {entry.stage}: gradients on weights up to {entry.staleness} updates old; "
            f"{entry.stashes} older versions kept, {format_bytes(entry.num_bytes)}"
        )
    return 1 if options.check and abs(mean) > POINT else 0


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def _job(batch: int, micro_batches: int, epochs: int, count: int, seed: int) -> plait.Job:
    """Its rate falls to 0, so that accuracies have come to rest when they are compared."""
    steps = epochs * -(-count // batch)
    return plait.Job(
        model=lenet,
        data=fashion,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
        schedule=lambda step: RATE * (1 - step / steps),
        batch=batch,
        accumulate=micro_batches,
        steps=steps,
        evaluate=lambda: fashion(held_out=True),
        metrics={"accuracy": accuracy},
        seed=seed,
    )


def _versions(stages: int, own: plait.Job) -> tuple[StageVersions, ...]:
    programs = prepare(own, resolve("pipedream", stages), "cpu", torch.float32, lambda event: None)
    return stage_versions(programs.for_sizes([(SAMPLES,)] * ROUND))


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--assert", dest="check", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
