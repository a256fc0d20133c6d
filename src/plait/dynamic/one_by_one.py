"""The same as `evaluate`, one vertex after the other, in plain PyTorch: what batches are compared with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.dynamic.schedule import Family, Schedule
from plait.errors import located

Function = Callable[[Family, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""Calls the user's function of a vertex: (family, own inputs, states of what it sees) to its states."""


def states_one_by_one(
    schedule: Schedule, function: Function, examples: Sequence[Tensor], inputs: Tensor | None
) -> tuple[Tensor, ...]:
    """The states of all vertices, in the schedule's rows."""
    made: list[Sequence[Tensor]] = []
    for group in schedule.groups:
        family: Any = group.family
        number = family.num_children
        for row in range(group.num_rows):
            own: list[Tensor] = []
            if family.has_input:
                assert inputs is not None
                own = [inputs[int(schedule.inputs[family][group.within + row])]]
            seen = [] if not number else group.seen[0][1][row * number : (row + 1) * number].tolist()  # type: ignore[index]
            states = [
                torch.stack([made[child][index] for child in seen])
                if seen
                else like.new_empty((0, *like.shape))
                for index, like in enumerate(examples)
            ]
            try:
                made.append(function(family, own, states))
            except Exception as error:
                raise located(error, schedule.place(len(made)))  # noqa: B904 - the same error
    return tuple(torch.stack(parts) for parts in zip(*made, strict=True))
