"""Copies of a user's module that behave like it.

In: a module. Out: a deep copy whose parameters have the hooks of the original, which `copy.deepcopy` leaves out.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plait.torch_private.autograd import hooks_of, late_hooks_of
from plait.torch_private.modules import tables_of


def copy_of(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; `memo` says what stands for objects that are not to be copied."""
    known = {} if memo is None else memo
    held = list(model.parameters())
    made = copy.deepcopy(model, known)
    for parameter in held:
        take_hooks(parameter, known[id(parameter)])
    return made


def in_dtype(
    model: nn.Module, dtype: torch.dtype, only: type[Tensor] = Tensor, left: Iterable[Tensor] = ()
) -> nn.Module:
    """`model.to(dtype)`; complex tensors get its width, and so do those that others refer to.

    `only`: what is cast; `left`: what is left as it is.
    """
    wide = {torch.float64: torch.complex128}
    cast: dict[int, Any] = {id(tensor): (tensor, tensor) for tensor in left}

    def converted(tensor: Tensor) -> Tensor:
        if id(tensor) not in cast:
            target = wide.get(dtype, tensor.dtype) if tensor.is_complex() else dtype
            new: Any = (
                tensor.detach().to(target) if tensor.is_complex() or tensor.is_floating_point() else tensor
            )
            if isinstance(tensor, nn.Parameter) and new is not tensor:
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                take_hooks(tensor, new)
            cast[id(tensor)] = (tensor, new)
        made: Tensor = cast[id(tensor)][1]
        return made

    for module in model.modules():
        for table in tables_of(module):
            for name, tensor in table.items():
                if isinstance(tensor, only):
                    table[name] = converted(tensor)
    return model


def take_hooks(original: nn.Parameter, copied: nn.Parameter) -> None:
    """Register the hooks of one parameter on another."""
    for hook in hooks_of(original):
        copied.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in late_hooks_of(original):
        copied.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
