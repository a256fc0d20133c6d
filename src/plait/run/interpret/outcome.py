"""What is seen of a step from outside: every instruction while it runs, and what came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from plait.program import instructions as ins
from plait.run.link.background import HopSpan


class Observer(Protocol):
    """Told of every instruction: the board that the launcher watches, and the trace."""

    def entering(self, step: int, instruction: ins.Instruction, waiting: bool) -> None: ...

    def done(self, step: int, instruction: ins.Instruction, start_ns: int, end_ns: int) -> None: ...

    def hopped(self, step: int, hops: Sequence[HopSpan]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What is known after a step; reading the numbers waits for the device."""

    total: Tensor
    weight: Tensor | float
    norm: Tensor | None
    """Global norm of the gradients before clipping, where it was computed."""

    @property
    def loss(self) -> float:
        """The mean over the whole batch."""
        return float(self.total / self.weight)  # one read: on a GPU each one waits for the device
