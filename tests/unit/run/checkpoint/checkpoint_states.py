"""States to save, a model with every awkward part, and ways to damage what was written."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.run.checkpoint.state import (
    OptimizerState,
    TrainingState,
    collect_model,
    collect_optimizer,
)


class Tied(nn.Module):
    """Tied in and out, a conv in channels-last, batch norm, dropout, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.drop(self.norm(self.embed(tokens)))
        image = self.conv(hidden.reshape(-1, 2, 1, 3).expand(-1, 2, 3, 3)).mean()
        logits: Tensor = self.head(hidden) + image * self.calls
        return logits


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int) -> TrainingState:
    parameters, buffers, aliases, transient = collect_model(model)
    return TrainingState(
        step=step,
        parameters=parameters,
        buffers=buffers,
        aliases=aliases,
        transient=transient,
        optimizer=collect_optimizer(optimizer, model.named_parameters()),
        schedule={"last_epoch": step},
        extra={"seed": 3, "best": float("inf"), "random": bytes(torch.get_rng_state().tolist()).hex()},
    )


def small_state(step: int, *, size: int = 4) -> TrainingState:
    weight = torch.full((size,), float(step))
    optimizer = OptimizerState(
        groups=[{"lr": 0.1, "names": ["w"], "shapes": [[size]]}],
        tensors={"w": {"exp_avg": weight + 1, "step": torch.tensor(float(step))}},
        values={"w": {"count": step, "gone": None}},
    )
    return TrainingState(
        step=step, parameters={"w": weight}, buffers={"b": torch.ones(2)}, optimizer=optimizer
    )


def assert_equal(first: TrainingState, second: TrainingState) -> None:
    assert (first.step, first.aliases, first.transient) == (second.step, second.aliases, second.transient)
    assert (first.schedule, first.extra) == (second.schedule, second.extra)
    assert (first.optimizer.groups, first.optimizer.values) == (
        second.optimizer.groups,
        second.optimizer.values,
    )
    pairs = [(first.parameters, second.parameters), (first.buffers, second.buffers)]
    assert first.optimizer.tensors.keys() == second.optimizer.tensors.keys()
    pairs += [
        (first.optimizer.tensors[name], second.optimizer.tensors[name]) for name in first.optimizer.tensors
    ]
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            assert torch.equal(mine[name], theirs[name]), name


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewrite_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json and make the manifest agree with it, as one who means harm would."""
    data = json.loads((folder / "state.json").read_text())
    change(data)
    (folder / "state.json").write_text(json.dumps(data))
    remake_manifest(folder)


def remake_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "complete.json").read_text())
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "complete.json").write_text(json.dumps(manifest))
