"""Workers that run free of each other, killed with all of their run at any moment: what is saved is whole steps.

The weights say it themselves: sample n moves weight n, by as much each time that it is trained on. So a checkpoint is
looked at for which samples are in it, and not for what the journal says of them.
"""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.run.checkpoint.store import load_checkpoint
from plait.run.start.processes import release_openmp

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]

STEPS, BATCH, EVERY = 240, 8, 3
"""Long enough to be killed long before its end."""


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Each sample is its number; some take longer, so that workers are apart."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.006 if index % 7 == 0 else 0.001)
        return torch.tensor(index)


class Tally(nn.Module):
    """A weight for each sample; of a sparse gradient, workers write to their own rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Embedding(STEPS * BATCH, 1, sparse=True)
        nn.init.zeros_(self.seen.weight)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.seen(numbers)
        return found.sum(1)


def job(**changes: Any) -> plait.Job:
    return plait.Job(
        model=Tally, data=Numbers, objective=lambda model, numbers: model(numbers).mean(), batch=BATCH, epochs=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), **changes,
    )  # fmt: skip


def train(folder: Path, plan: str, ranks: int, resume: bool) -> None:
    saving = plait.Saving(checkpoint_every=EVERY, record_samples=True, trace=False)
    limits = plait.Limits(hang_s=20)
    if resume:
        plait.resume(folder, ranks, job=job(), plan=plan, saving=saving, limits=limits)
    else:
        plait.train(job(), plan, ranks, out=folder, saving=saving, limits=limits)


def killed_at_some_moment(folder: Path, plan: str, ranks: int, after: int, choice: random.Random) -> None:
    """Start, or go on with, a run of its own, and kill its parent some time after a checkpoint of step `after`."""
    release_openmp()  # whose threads a child does not have, and would wait for
    pid = os.fork()
    if pid == 0:
        try:
            train(folder, plan, ranks, resume=after > 0)
        finally:
            os._exit(1)
    while saved_step(folder) <= after:
        time.sleep(0.002)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it has ended"
    time.sleep(choice.uniform(0.0, 0.1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def saved_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-????????")), default=0)


def times_used(folder: Path) -> tuple[int, list[float]]:
    """(step of the newest checkpoint, how often each sample is in its weights)."""
    saved = load_checkpoint(folder)
    moved = saved.parameters["seen.weight"].flatten() * -(BATCH // 2)
    return saved.step, moved.tolist()


@pytest.mark.parametrize(("plan", "ranks"), [("server-async", 3), ("hogwild", 2)])
def test_a_checkpoint_holds_whole_steps_and_each_sample_is_used_once(
    tmp_path: Path, plan: str, ranks: int
) -> None:
    choice, folder, step = random.Random(plan), tmp_path / "run", 0
    order = job().order(STEPS * BATCH)
    assert order is not None
    for _ in range(2):
        killed_at_some_moment(folder, plan, ranks, step, choice)
        step, used = times_used(folder)
        assert step % EVERY == 0 and step < STEPS
        before = {number for done in range(step) for number in order.at(done).ids.tolist()}
        assert used == [float(number in before) for number in range(STEPS * BATCH)]
    train(folder, plan, ranks, resume=True)
    assert times_used(folder) == (STEPS, [1.0] * (STEPS * BATCH))
    entries = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted(number for entry in entries for number in entry["ids"]) == [*range(STEPS * BATCH)]
    assert not any(entry.get("lost") for entry in entries)
