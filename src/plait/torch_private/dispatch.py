"""Modes that see every op below autograd. Private to torch (`torch.utils._python_dispatch`, `torch._C`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "heard", "unheard", "without_modes", "without_row_by_row"]

unheard = torch._C.DisableTorchFunction
"""While active, no `TorchFunctionMode` hears of functions that are called."""
heard = torch._C._EnableTorchFunction
"""While active, they do so again."""


@contextmanager
def without_modes() -> Iterator[None]:
    """While active, ops are those of real tensors: no mode sees them, that of fake tensors and traces included."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def without_row_by_row() -> Iterator[None]:
    """While active, `vmap` raises for an op that it would else run for one row after the other."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
