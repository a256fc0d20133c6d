"""Of autograd and optimizers: what torch notes on its own objects."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_LINE = re.compile(r'File "(.+?)", line (\d+)')


def number_of_last() -> int:
    """The number of the autograd node that was made last in this thread."""
    return torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]


def number_of_differentiated() -> int | None:
    """The number of the autograd node that is being differentiated; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


def line_of_differentiated(skip: Callable[[str], bool]) -> str | None:
    """Where the op that is being differentiated was called, as file:line; None outside of a backward pass.

    Torch notes it in anomaly mode alone. Files to `skip` are not named.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    written = "".join(node.metadata.get("traceback_", ()))
    lines = [(file, number) for file, number in _LINE.findall(written) if not skip(file)]
    return ":".join(lines[-1]) if lines else "its own code"


def is_transformed() -> bool:
    """Whether the call is made inside torch.func's grad, vmap or their like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def hooks_of(parameter: Tensor) -> list[Callable[..., Any]]:
    """What `register_hook` was given."""
    return list((parameter._backward_hooks or {}).values())


def late_hooks_of(parameter: Tensor) -> list[Callable[..., Any]]:
    """What `register_post_accumulate_grad_hook` was given."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place."""
    return 0 if tensor.is_inference() else tensor._version


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped: torch warns where a scheduler steps first."""
    optimizer.__dict__["_opt_called"] = True


def saved(node: Any, name: str) -> Any:
    """What an autograd node keeps of the op that made it, by the name of its argument."""
    return getattr(node, f"_saved_{name}")


def is_number(operand: Any) -> bool:
    """Whether an op was given this as a Python number: as a tensor, it yields to the dtype of any other."""
    if not isinstance(operand, Tensor):
        return True
    short = {torch.int64: torch.int8, torch.float64: torch.float16}.get(operand.dtype)
    return short is not None and torch.result_type(torch.ones((), dtype=short), operand) == short
