"""What an optimizer function may return.

Goes in: its result and the parameters that it was given. Comes out: the same optimizer. Never steps it.
"""

import inspect
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from plait.errors import JobError
from plait.job.batch import describe


def checked_optimizer(optimizer: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, if every plan can step it on exactly these parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer(...) returned {describe(optimizer)}, not a torch.optim.Optimizer.",
            fix="return the optimizer: lambda params: torch.optim.SGD(params, lr=0.1).",
        )
    known = {id(parameter) for parameter in parameters}
    used = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in used if id(parameter) not in known]
    if foreign:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:3])
        raise JobError(
            f"the optimizer uses {len(foreign)} of {len(used)} parameters that it was not given (shapes {shapes}"
            f"{', ...' if len(foreign) > 3 else ''}).",
            fix="build it from the argument only, not from a model outside: lambda params: torch.optim.SGD(params).",
        )
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Real) and not 0 <= float(rate) < math.inf:
            raise JobError(
                f"the learning rate of {type(optimizer).__name__} is {rate}.",
                fix="give a finite one, 0 or more.",
            )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again, several times a step.",
            fix="use an optimizer that takes one gradient a step, such as SGD, Adam or AdamW.",
        )
    return optimizer
