"""Of autograd and optimizers: what torch notes on its own objects."""

from typing import Any

from torch.optim import Optimizer


def function_of_backward(backward: type) -> Any:
    """The user's `autograd.Function` from which torch made a backward node's type; AttributeError where none."""
    return backward._forward_cls  # type: ignore[attr-defined]


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped: torch warns where a scheduler steps first."""
    optimizer.__dict__["_opt_called"] = True
