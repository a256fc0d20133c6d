"""What is seen of a step from outside: every instruction while it runs, and what came out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
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
    """What is known after a step; reading total, weight and norm waits for all that the device has been given to do."""

    total: Tensor
    weight: Tensor | float
    norm: Tensor | None
    """Global norm of the gradients before clipping, where it was computed."""
    early: Callable[[], float] | None = None
    """Reads the loss when it is there, whatever the device does after it; None: as the other numbers are read."""

    @property
    def loss(self) -> float:
        """The mean over the whole batch."""
        return self.early() if self.early is not None else float(self.total / self.weight)


def on_its_way(scalar: Tensor) -> Callable[[], float]:
    """What reads a scalar as soon as a device has computed it: what is launched after this call is not waited for."""
    if not scalar.is_cuda:
        return lambda: float(scalar)
    copy, there = scalar.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def read() -> float:
        there.synchronize()
        return float(copy)

    return read
