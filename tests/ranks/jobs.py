"""Jobs that tests run through the command line and in real processes, and what tests of whole runs share.

One file that the command line can load by its path: `jobs.py:dropout` and so on. Every job takes milliseconds
a step.
"""

import itertools
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait import Job
from plait.cli.main import call

HERE = Path(__file__)
NUM_SAMPLES = 97


def samples(count: int = NUM_SAMPLES, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Vectors in ten classes that a linear map can mostly tell apart."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    teacher = torch.randn(16, 10, generator=torch.Generator().manual_seed(99))
    return list(zip(inputs, (inputs @ teacher).argmax(1), strict=True))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )


def right(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How many answers are right, and of how many."""
    return (output.argmax(1) == target).sum(), torch.tensor(len(target))


def dropout() -> Job:
    """All that could depend on the number of ranks: dropout, batch norm, clipping, a schedule, a last step of 7."""
    return Job(
        model=network,
        data=samples,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1.0),
        schedule=lambda step: 0.02 * 0.95**step,
        clip_norm=1.0,
        batch=15,
        epochs=2,
        evaluate=lambda: samples(31, seed=1),
        metrics={
            "accuracy": right,
            "error": lambda output, target: (output.argmax(1) != target).float().mean(),
        },
    )


def plain() -> Job:
    """The smallest job: no evaluation, steps of equal size."""
    return Job(
        model=lambda: nn.Linear(16, 10),
        data=lambda: samples(64),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch=16,
        epochs=1,
    )


class Layerwise(torch.optim.Optimizer):
    """LARS without momentum: a tensor's step is as long as its weights are."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-float(group["lr"] * p.norm() / (p.grad.norm() + 1e-3)))


class Marked(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The samples of `plain`, one of which does something first; None: all do."""

    def __init__(self, mark: int | None, action: Any) -> None:
        self._samples, self._mark, self._action = samples(64), mark, action

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._mark is None or index == self._mark:
            self._action()
        return self._samples[index]


MARK = 42


def slow() -> Job:
    """Runs long enough to be killed or interrupted: 400 steps of at least 5 ms, dropout included."""
    data = Marked(None, lambda: time.sleep(0.0006))
    return replace(dropout(), data=data, epochs=None, steps=400, evaluate=None, metrics=None)


def killed() -> Job:
    """The rank that reads one sample dies of SIGKILL."""
    return replace(plain(), data=Marked(MARK, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def hanging() -> Job:
    """The rank that reads one sample never comes back."""
    return replace(plain(), data=Marked(MARK, _oversleep))


def _oversleep() -> None:
    time.sleep(100)


def stop_once(marker: Path) -> None:
    """Stop the process that comes here first, as SIGSTOP does."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)


def broken_sample() -> Job:
    """One sample cannot be read."""

    def fail() -> None:
        raise OSError(f"sample {MARK} is broken")

    return replace(plain(), data=Marked(MARK, fail))


class FailsOnMark(nn.Module):
    """Raises when it meets a sample whose first number is huge; decides in Python, so it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        if float(x[:, 0].max()) > 1e6:
            raise ArithmeticError("the network met a huge number")
        return self.inner(x)


def raising_model() -> Job:
    """The model raises on the rank that has one sample, in some later step."""
    data = samples(64)
    data[MARK] = (torch.full((16,), 1e7), data[MARK][1])
    return replace(plain(), model=FailsOnMark, data=data)


def diverging() -> Job:
    """The loss is NaN after the first update."""
    return replace(plain(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e38))


def cli(*arguments: str | Path) -> int:
    """The exit code of `plait ARGUMENTS`, run in this process."""
    return call([str(argument) for argument in arguments])


def reference(job: str) -> str:
    """How the command line names a job of this file."""
    return f"{HERE}:{job}"


def children() -> set[int]:
    """Processes that this one has started and that are not gone, zombies too."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                stat = (path / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[1]) == os.getpid():
                found.add(int(path.name))
    return found


def with_helper() -> Job:
    """The data starts a helper in its process group and one that is detached; the ids of both are written down."""
    folder = Path(os.environ["HELPERS"])

    def start() -> None:
        for detached in (False, True):
            path = folder / f"{os.getpid()}-{detached}"
            if not path.exists():
                helper = subprocess.Popen(["sleep", "300"], start_new_session=detached)
                path.write_text(str(helper.pid))
        time.sleep(0.001)

    return replace(slow(), data=Marked(None, start))


def ever_slower() -> Job:
    """Steps of which the later ones take so long that nobody waits for their end."""
    count = itertools.count()

    def read() -> None:
        time.sleep(0.0005 if next(count) < 100 else 20.0)

    return replace(slow(), data=Marked(None, read))
