"""Tracing Python into aten graphs. Not promised by torch (`torch.fx.experimental`)."""

from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)


def tracer() -> Any:
    """What is tracing: `graph` is the graph under construction, `root` holds its constants."""
    mode = get_proxy_mode()
    assert mode is not None, "nothing is being traced"
    return mode.tracer


def node_of(tensor: Tensor) -> fx.Node | None:
    """The node that stands for a tensor now; None: it was not traced."""
    slot: Any = get_proxy_slot(tensor, tracer(), None)
    return None if slot is None else slot.proxy.node


untraced = disable_proxy_modes_tracing
"""While active, ops are run and not traced."""

__all__ = ["make_fx", "node_of", "tracer", "untraced"]
