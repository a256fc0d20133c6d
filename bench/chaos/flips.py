"""A bit of one weight that flips on one rank, after an update: as memory does that fails.

In: a run, and from outside an order to flip. Out: the rank that was meant does it after its next update, once.
"""

import random
from pathlib import Path

import torch

from plait.program.instructions import Update
from plait.run.interpret.machine import Machine
from plait.run.interpret.step import Step

_BITS = 31
"""Of a float32, without its sign."""


def order_flip(folder: Path, rank: int) -> None:
    """Have a rank of the run in this folder flip a bit."""
    _order(folder, rank).touch()


def obey_flips(folder: Path) -> None:
    """In the process that becomes the run, before its ranks are forked."""
    exact = Machine._update

    def update(machine: Machine, now: Step, instruction: Update) -> None:
        exact(machine, now, instruction)
        order = _order(folder, machine.rank)
        if order.exists():
            order.unlink()
            _flip(machine, random.Random(machine.step))

    setattr(Machine, "_update", update)  # noqa: B010, a method of ours is wrapped


def _flip(machine: Machine, choice: random.Random) -> None:
    parameter = choice.choice(list(machine.state.parameters.values())).detach().view(-1)
    at = choice.randrange(parameter.numel())
    parameter[at : at + 1].view(torch.int32).bitwise_xor_(1 << choice.randrange(_BITS))


def _order(folder: Path, rank: int) -> Path:
    return folder.parent / f"flip-{rank}"
