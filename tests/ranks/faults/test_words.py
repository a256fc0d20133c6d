"""What a run says: names of the user's as they are, and what is left when Ctrl-C comes twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import forked
from tests.ranks import jobs

pytestmark = pytest.mark.timeout(90)

PLAIT = Path(sys.executable).parent / "plait"
JOB = """
import torch
from torch import nn
from plait import Job

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("[/red]", nn.Linear(4, 2))
    def forward(self, x):
        return getattr(self, "[/red]")(x)

def job():
    data = [(torch.randn(4), torch.tensor(0)) for _ in range(8)]
    right = lambda output, target: (output.argmax(1) == target).float().mean()
    return Job(model=Odd, data=data, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
               batch=4, steps=2, evaluate=data, metrics={"[/red]": right, ":smile:": right})
"""


def test_names_that_look_like_markup_are_shown_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "odd[/red].py".replace("/", "∕"), tmp_path / "[red]"
    file.write_text(JOB)
    assert jobs.cli("run", file, "--ranks", "1", "--out", folder) == 0
    assert "[/red] " in capfd.readouterr().out
    assert jobs.cli("report", folder) == 0
    shown = capfd.readouterr().out
    assert "[/red]" in shown
    assert ":smile:" in shown
    assert jobs.cli("graph", file) == 0
    assert "[/red]" in capfd.readouterr().out
    assert jobs.cli("verify", file, "--plan", "ddp", "--serial", "--steps", "1") == 0
    assert jobs.cli("graph", file, "--placements", "--plan", "ddp", "--ranks", "2") == 0
    assert "[/red]" in capfd.readouterr().out


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_second_ctrl_c_says_what_is_left(ranks: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = forked.plait(
        "run", jobs.reference("ever_slower"), "--ranks", ranks, "--out", folder, "--checkpoint-every", "5"
    )
    deadline, newest, since = time.monotonic() + 60, "", time.monotonic()
    while not newest or time.monotonic() - since < 2:  # until a step begins that nobody waits for
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
        if (
            found := max((path.name for path in folder.glob("checkpoints/step-????????")), default="")
        ) != newest:
            newest, since = found, time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=30)
    assert process.returncode == 130, (out, told)
    assert f"interrupted and ended at once: nothing was saved after {newest};" in told
    assert f"to go on from there: plait run --resume {folder}" in told
    assert "Traceback" not in told


def test_one_ctrl_c_ends_the_start_whenever_it_comes(tmp_path: Path) -> None:
    """While libraries are imported, while the model is captured, while ranks start: one line, and nothing is left."""
    began, waiting = time.monotonic(), []
    for number, after_s in enumerate((0.5, 1.5, 2.5, 3.5)):
        process = subprocess.Popen(
            [PLAIT, "run", jobs.reference("slow"), "--plan", "ddp", "--ranks", "2", "--out", tmp_path / str(number)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )  # fmt: skip
        waiting.append((after_s, process))
    for after_s, process in waiting:
        time.sleep(max(0.0, began + after_s - time.monotonic()))
        process.send_signal(signal.SIGINT)
    for _, process in waiting:
        _, told = process.communicate(timeout=60)
        assert process.returncode == 130, told
        assert told.strip().splitlines()[-1].startswith("interrupted"), told
        assert "Traceback" not in told
