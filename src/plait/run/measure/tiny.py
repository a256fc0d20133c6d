"""A run of nearly nothing, in a process of its own: what is left is the overhead of every run.

    python -m plait.run.measure.tiny RANKS DEVICE

Prints JSON: seconds a step, bytes of a rank's process, seconds from the start to the first step.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from plait.callbacks import Watching
from plait.errors import RunError
from plait.files.scratch import scratch_folder
from plait.job.job import Job
from plait.processes import run_program
from plait.run.train import train

_STEPS = 40
"""Of the tiny job: enough that the first ones, which allocate, do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """What a run costs beside its work."""

    step_s: float
    """Of a step that computes nothing to speak of."""
    memory_bytes: int
    """Of a rank that holds nothing to speak of."""
    start_s: float
    """Until the first step."""


def measure_overhead(ranks: int, device: str = "cpu") -> Overhead:
    """Run it and read what it says."""
    command = [sys.executable, "-m", "plait.run.measure.tiny", str(ranks), device]
    alone = {**os.environ, "PLAIT_TASKS": "1", "PLAIT_TASK": "0"}  # also where an engine started this process
    try:
        done = run_program(command, alone, patience_s=120)
    except TimeoutError as error:
        raise RunError(f"a trivial run failed: {error}.") from error
    if done.status:
        raise RunError(f"a trivial run failed: {done.err.strip()[-400:]}")
    return Overhead(**json.loads(done.out.splitlines()[-1]))


def _model() -> nn.Module:
    """Small, but of ops that make the libraries load what they need."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 8),
        nn.GELU(),
        nn.Linear(8, 1),
    )


def main() -> None:
    """What the process does."""
    began = time.perf_counter()
    ranks, device = int(sys.argv[1]), sys.argv[2]
    data = (torch.zeros(64, 3, 8, 8), torch.zeros(64, 1))
    job = Job(
        model=_model, data=data, loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1), batch=16, steps=_STEPS,
    )  # fmt: skip
    started = []

    def heard(event: dict[str, object]) -> None:
        if "started" in event:
            started.append(time.perf_counter())

    with scratch_folder() as folder:
        result = train(
            job,
            "ddp" if ranks > 1 else "single",
            ranks,
            out=folder / "run",
            device=device,
            watching=Watching(listener=heard),
        )
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step_s"] for line in lines if "step_s" in line]
    found = {
        "step_s": median(steps[5:]),
        "memory_bytes": lines[-1]["memory_bytes"],
        "start_s": started[0] - began + steps[0],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
