"""What the user's own code raises is told as theirs, with their line, whatever part it is and whatever the command."""

from pathlib import Path

import pytest

from plait.cli.main import call

JOB = """
import torch
from torch import nn
from plait import Job

def boom(*given):
    raise RuntimeError("of my own")

class Broken(nn.Linear):
    def forward(self, x):
        return boom(x)

class Damaged(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, at): return boom(at)

def job(part: str = ""):
    data = [(torch.ones(4), torch.tensor(0))] * 8
    parts = {"model": lambda: nn.Linear(4, 2), "data": data, "loss": nn.CrossEntropyLoss(), "schedule": None,
             "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "collate": None, "sampler": None}
    broken = {"model": boom, "forward": lambda: Broken(4, 2), "data": boom, "sample": Damaged(), "loss": boom,
              "optimizer": boom, "collate": boom, "sampler": boom,
              "schedule": boom, "scheduler": lambda optimizer: boom(optimizer)}
    if part == "job":
        boom()
    if part:
        parts[{"forward": "model", "sample": "data", "scheduler": "schedule"}.get(part, part)] = broken[part]
    return Job(batch=4, steps=2, **parts)
"""
LINE = JOB.splitlines().index('    raise RuntimeError("of my own")') + 1
PARTS = (
    "job",
    "model",
    "forward",
    "data",
    "sample",
    "loss",
    "optimizer",
    "collate",
    "sampler",
    "schedule",
    "scheduler",
)
COMMANDS = {
    "run": ("--steps", "2"),
    "verify": ("--plan", "ddp", "--ranks", "2", "--serial"),
    "graph": (),
    "predict": ("--plan", "ddp", "--cluster", "2xA100"),
    "plan": ("--cluster", "2xA100"),
}
UNUSED = {("graph", "optimizer")} | {
    (command, part)
    for command in ("graph", "plan", "predict")
    for part in ("schedule", "scheduler", "sampler")
}
"""What a command does not call, and need not."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", PARTS)
def test_their_line_is_named(
    command: str,
    part: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (command, part) in UNUSED:
        pytest.skip("the command does not call it")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(JOB)
    code = call([command, str(file), "--arg", f"part={part}", *COMMANDS[command]])
    told = " ".join("".join(capfd.readouterr()).split())
    assert code in (1, 2), told
    assert f"{file}:{LINE}" in told.replace(" ", "") and "RuntimeError: of my own" in told, told
    assert "Traceback" not in told and "Fix: " in told, told
