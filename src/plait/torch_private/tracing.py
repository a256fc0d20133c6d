"""Tracing Python into aten graphs. Not promised by torch (`torch.fx.experimental`)."""

from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx


def nodes_so_far() -> int:
    """Number of nodes in the graph that is being traced; 0 outside of tracing."""
    mode = get_proxy_mode()
    return len(mode.tracer.graph.nodes) if mode is not None else 0


__all__ = ["make_fx", "nodes_so_far"]
