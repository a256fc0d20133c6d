"""A run of one rank hears what asks it to end as ranks in processes of their own do."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from plait.api.train import train
from plait.callbacks import Callback, StepDone, Watching
from plait.job.job import Job


class Signals(Callback):
    """Sent during the third step."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def on_step(self, event: StepDone) -> None:
        if event.step == 2:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGUSR1,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
    ids=["time is nearly up", "passed on twice", "all of them"],
)
def test_what_batch_systems_send_saves_the_run(numbers: tuple[int, ...], tmp_path: Path) -> None:
    job = Job(
        model=lambda: nn.Linear(3, 1), data=[(torch.ones(3), torch.ones(1))] * 80, loss=nn.MSELoss(), batch=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )  # fmt: skip
    before = signal.getsignal(signal.SIGUSR1)
    done = train(job, "single", out=tmp_path / "run", watching=Watching(callbacks=[Signals(*numbers)]))
    assert (len(done.losses), done.stopped) == (3, "interrupted")
    assert [saved.name for saved in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert signal.getsignal(signal.SIGUSR1) == before
