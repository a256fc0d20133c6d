"""What a network computes in, and what its weights are kept in.

Goes in: a job's `precision`. Comes out: the dtype of autocast, a network with 16-bit weights, an optimizer that updates
float32 masters of them. A master is one more tensor of the optimizer's state: whoever cuts, counts or saves that state
need not know of it.
"""

from typing import Any, Literal, get_args

import torch
from torch import nn

from plait.job.model.copies import in_dtype
from plait.torch_private import foreach
from plait.torch_private.modules import NormBase

Precision = Literal["fp32", "bf16", "bf16-weights", "fp16", "fp8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
"""All that a job may say."""
MASTER = "master"
"""What the optimizer's state calls the float32 weight of a parameter that is kept in 16 bits."""
_HALVES = {
    "bf16": torch.bfloat16,
    "bf16-weights": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def half_of(precision: str) -> torch.dtype | None:
    """What autocast casts to; None: no autocast."""
    return _HALVES.get(precision)


def with_short_weights(model: nn.Module) -> nn.Module:
    """The network with parameters in bfloat16; buffers, which are statistics and tables, stay as they are.

    So do the few weights that stand beside statistics: torch has no kernel for both.
    """
    norms = [module for module in model.modules() if isinstance(module, NormBase)]
    beside = [p for norm in norms if norm.running_mean is not None for p in norm.parameters(recurse=False)]
    return in_dtype(model, torch.bfloat16, only=nn.Parameter, left=beside)


def keep_masters(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update float32 masters of 16-bit parameters, which are rounded from them after every step.

    A master begins as the parameter is; gradients are given to the optimizer in float32.
    """
    swapped: list[tuple[dict[str, Any], list[Any], list[nn.Parameter], list[Any]]] = []

    def to_masters(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in own.param_groups:
            given = group["params"]
            short = [p for p in given if p.grad is not None and p.dtype in (torch.bfloat16, torch.float16)]
            masters = {}
            wide = [torch.empty_like(parameter.grad, dtype=torch.float32) for parameter in short]
            if wide:
                foreach.copy_(wide, [parameter.grad for parameter in short])
            for parameter, gradient in zip(short, wide, strict=True):
                state = own.state.pop(parameter, {})
                held = state.pop(MASTER, None)
                master = nn.Parameter(parameter.detach().float() if held is None else held)
                master.grad = gradient
                if state:
                    own.state[master] = state
                masters[parameter] = master
            group["params"] = [masters.get(parameter, parameter) for parameter in given]
            swapped.append((group, given, list(masters.values()), short))

    def to_parameters(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, given, masters, short in swapped:
            group["params"] = given
            for master, parameter in zip(masters, short, strict=True):
                master.grad = None
                own.state[parameter] = own.state.pop(master, {}) | {MASTER: master.detach()}
            if short:
                with torch.no_grad():
                    foreach.copy_(list(short), [master.detach() for master in masters])
        swapped.clear()

    optimizer.register_step_pre_hook(to_masters)
    optimizer.register_step_post_hook(to_parameters)
