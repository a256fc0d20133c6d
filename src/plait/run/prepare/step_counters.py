"""What an optimizer counts its steps with, wherever it keeps that.

In: an optimizer that is stepped. Out: its counters, which may be set forward, so that what it does late in a run is
seen without the steps before it. A counter is a number that one step made larger by one: in the state of a parameter,
in a group, or an attribute of the optimizer or of one that it wraps.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from plait.job.updates.optimizers import leaves_of

_DEEPEST = 3
"""Dicts within dicts of state: that of a wrapper, of a parameter, of a block."""


class StepCounters:
    """The counters of one optimizer; `look` once after every step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[tuple[int, Any], float] = {}
        self._found: dict[tuple[int, Any], dict[Any, Any]] = {}

    def look(self) -> None:
        """Note which numbers have grown by one since the last look."""
        now, holders = dict[tuple[int, Any], float](), dict[tuple[int, Any], dict[Any, Any]]()
        for holder in _holders(self._optimizer):
            for key, value in holder.items():
                if (number := _number(value)) is not None:
                    now[id(holder), key], holders[id(holder), key] = number, holder
        self._found = {
            place: holder
            for place, holder in holders.items()
            if place in self._before and now[place] == self._before[place] + 1
        }
        self._before = now

    def set_forward(self, count: int) -> bool:
        """Let every counter have counted so many steps, but none fewer than before; whether there is one."""
        for (place, key), holder in self._found.items():
            if self._before[place, key] >= count:
                continue
            value = holder[key]
            if isinstance(value, torch.Tensor):
                value.fill_(count)
            else:
                holder[key] = type(value)(count)
            self._before[place, key] = float(count)
        return bool(self._found)


def _number(value: Any) -> float | None:
    """A whole number, in Python or in a tensor of one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value == value // 1 else None


def _holders(optimizer: Optimizer) -> Iterator[dict[Any, Any]]:
    """Every dict in which it may keep a number."""
    waiting, seen = leaves_of(optimizer), set[int]()
    while waiting:
        leaf = waiting.pop()
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        yield vars(leaf)
        waiting += [value for value in vars(leaf).values() if isinstance(value, Optimizer)]
        yield from leaf.param_groups
        for state in list(leaf.state.values()):
            yield from _nested(state, _DEEPEST)


def _nested(state: Any, depth: int) -> Iterator[dict[Any, Any]]:
    if isinstance(state, dict) and depth:
        yield state
        for value in list(state.values()):
            yield from _nested(value, depth - 1)
