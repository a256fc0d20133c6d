"""What batches of graphs were like: of the last one, and of all together, for the report of a run.

In: what each batch was like when it was ordered. Out: sums, as plain numbers that fit into a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """What the last batch was like."""

    num_vertices: int
    """Vertices; of recorded code, operations."""
    group_sizes: tuple[int, ...]
    """Those that were evaluated together, in order."""
    schedule_s: float
    """Time that reading or recording the graphs and ordering them took."""
    level_sizes: tuple[int, ...] = ()
    """Vertices of each level; nothing for recorded code."""


class Scheduled(nn.Module):
    """A module that schedules what it evaluates, and counts it where it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.batched = True
        """False: one after the other, in plain PyTorch."""
        self.last: Scheduling | None = None
        """What the last batch was like."""
        self._forget()

    def _forget(self) -> None:
        """Nothing was counted."""
        self._num_batches = self._num_calls = self._num_vertices = self._num_operations = 0
        self._schedule_s = 0.0
        self._levels: list[int] = []

    def _note(self, last: Scheduling) -> None:
        self.last = last
        if not (self.training and torch.is_grad_enabled()):
            return
        self._num_batches += 1
        self._num_calls += len(last.group_sizes)
        self._schedule_s += last.schedule_s
        if last.level_sizes:
            self._num_vertices += last.num_vertices
            self._levels = added(self._levels, last.level_sizes)
        else:
            self._num_operations += last.num_vertices


def added(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Entry by entry; the longer one's rest as it is."""
    short, long = sorted((first, second), key=len)
    return [a + b for a, b in zip(short, long, strict=False)] + list(long[len(short) :])


def taken_counts(model: nn.Module) -> dict[str, Any] | None:
    """What all parts of a model have counted since this was asked last; None: it has no graphs of samples."""
    parts = [part for part in model.modules() if isinstance(part, Scheduled)]
    if not parts:
        return None
    found: dict[str, Any] = {
        "batches": max(part._num_batches for part in parts),
        "calls": sum(part._num_calls for part in parts),
        "vertices": sum(part._num_vertices for part in parts),
        "operations": sum(part._num_operations for part in parts),
        "schedule_s": sum(part._schedule_s for part in parts),
        "levels": [],
    }
    for part in parts:
        found["levels"] = added(found["levels"], part._levels)
        part._forget()
    return found


def run_one_by_one(model: nn.Module) -> None:
    """Turn batches off wherever the model has them: each vertex, each sample by itself, in plain PyTorch."""
    for part in model.modules():
        if isinstance(part, Scheduled):
            part.batched = False
