"""Fake tensors: shapes, dtypes and devices without memory. Private to torch (`torch._subclasses`)."""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import _subclasses as subclasses
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from plait.folders import PLAIT, TORCH

FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""The logger to which torch writes a traceback of its own for an op that fails on fake tensors."""


def storage_of(tensor: Tensor) -> int:
    """What tensors have in common that share memory, fake ones too."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """What `copy.deepcopy` makes of a fake tensor.

    Torch 2.13 copies the memory of those that `torch.tensor` made, of which there is none: it writes over the heap.
    """
    if id(tensor) not in memo:
        with torch.no_grad():
            made = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name not in vars(made):  # the user's own
                setattr(made, name, value)
        memo[id(tensor)] = made
    return memo[id(tensor)]  # type: ignore[no-any-return]


FakeTensor.__deepcopy__ = _copied  # type: ignore[method-assign]


class _NoTensor:
    """What no tensor is."""


class _Answering(types.ModuleType):
    """A module of torch that says who asks for its `FakeTensor`."""

    ask: Callable[[str], None]
    hide: bool

    @property
    def FakeTensor(self) -> type:  # noqa: N802
        """The class; for code that is not torch's, and not ours, another one where it is hidden."""
        frame = sys._getframe(1)
        if frame.f_code.co_filename.startswith((TORCH, PLAIT)):
            return FakeTensor
        vars(self)["ask"](f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return _NoTensor if vars(self)["hide"] else FakeTensor


@contextmanager
def hidden_fakes(ask: Callable[[str], Any], *, hide: bool) -> Iterator[None]:
    """While active, `ask` hears of lines that ask for the class of fake tensors; `hide`: they get one of none."""
    with ExitStack() as stack:
        for module in (subclasses, fake_tensor):
            vars(module).update(ask=ask, hide=hide)
            before = module.__class__
            module.__class__ = _Answering
            stack.callback(setattr, module, "__class__", before)
            for name in ("ask", "hide"):
                stack.callback(vars(module).pop, name, None)
        yield


__all__ = [
    "FAKE_LOGGER",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "hidden_fakes",
    "storage_of",
]
