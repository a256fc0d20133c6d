"""The forward pass of the loss form, and what a loss, an objective or a metric may return.

Goes in: what the user's functions returned. Comes out: a scalar tensor or (total, weight), both tensors.
Never reads a tensor's values, so it also works on fake tensors while a graph is captured.
"""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.errors import JobError
from plait.job.batch import describe, tensors_in


def forward(model: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
    """(model(*inputs), target) for a batch (*inputs, target)."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise JobError(
            f"with loss= a batch is (*inputs, target); this one is {describe(batch)}.",
            fix="let each sample be a tuple (input, target), or use objective=(model, batch) -> scalar.",
        )
    *inputs, target = batch
    output = model(*inputs)
    if next(tensors_in(output), None) is None and _has_no_place_for_tensors(output):
        raise JobError(
            f"the model returned {describe(output)}, which holds no tensor.",
            fix="return a tensor from forward(), or use objective=(model, batch) -> scalar.",
        )
    return output, target


def refuse_no_gradient(num_trained: int) -> NoReturn:
    """Nothing would be learned."""
    raise JobError(
        f"the loss has no gradient with respect to any of the model's {num_trained} trained tensors.",
        fix="compute it from the model's output, by ops that have a gradient: argmax, rounding, .item(), .detach() and "
        "torch.no_grad() have none.",
    )


def refuse_own_gradients(parameters: Mapping[str, Tensor]) -> None:
    """`backward()` inside of an objective leaves gradients that are none of what it returns."""
    left = [name for name, parameter in parameters.items() if parameter.grad is not None]
    if left:
        raise JobError(
            f"the objective calls backward() itself, which leaves a gradient in {left[0]} (and {len(left) - 1} more) "
            "that its loss knows nothing of.",
            fix="return the sum of all losses; for gradients that it needs by itself, use torch.autograd.grad, or call "
            "model.zero_grad() before it returns.",
        )


def checked(noun: str, result: Any, *, numbers: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The result as a scalar tensor or a pair of them; `numbers`: plain numbers count as scalars too."""
    if isinstance(result, tuple | list) and len(result) == 2:
        total, weight = result
        if isinstance(weight, Real):
            weight = _constant(float(weight), total)
        if numbers and isinstance(total, Real):
            total = _constant(float(total), None)
        if _is_scalar(total) and _is_scalar(weight):
            return total, weight
    elif _is_scalar(result):
        assert isinstance(result, Tensor)
        return result
    elif numbers and isinstance(result, Real):
        return _constant(float(result), None)
    raise JobError(
        f"the {noun} returned {_in_full(result)}, neither a scalar tensor nor (total, weight).",
        fix="reduce it to one number, for example with .mean(), or return (values.sum(), count).",
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _constant(number: float, beside: Any) -> Tensor:
    # A count in bf16 would be rounded from 257 on.
    if not isinstance(beside, Tensor):
        return torch.full((), number)
    dtype = beside.dtype if beside.dtype == torch.float64 else torch.float32
    return torch.full((), number, dtype=dtype, device=beside.device)


def _in_full(result: Any) -> str:
    if isinstance(result, tuple | list) and len(result) == 2:
        return f"({describe(result[0])}, {describe(result[1])})"
    return describe(result)


def _has_no_place_for_tensors(output: Any) -> bool:
    """Known to hold no tensor; an object of the user's own class may, and is left to the loss."""
    known = output is None or isinstance(output, bool | int | float | str | bytes | tuple | list | dict)
    return known or type(output).__module__ == "numpy"
