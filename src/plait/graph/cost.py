"""What each op of a graph costs: FLOPs by torch's own formulas, bytes from the shapes.

In: nodes with fake values. Out: numbers. Never runs anything.
"""

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from plait.torch_private import pytree

_RECURRENT = {
    "plait.lstm_layer": None,
    "plait.lstm_layer_backward": 3,
    "plait.rnn_layer": None,
    "plait.rnn_layer_backward": 2,
}
"""Layers of recurrent cells, and how many gradients come before the arguments of the layer."""


def node_flops(node: fx.Node) -> int:
    """FLOPs of one node; 0 where torch's counter counts none."""
    packet = getattr(node.target, "overloadpacket", None)
    name = str(packet)  # ops of plait may not be loaded
    if name in _RECURRENT:
        return _recurrent_flops(node, backward=_RECURRENT[name])
    if name == "plait.attention":
        q, *shared = (_shape(node.args[i]) for i in range(3))
        k, v = (torch.Size((*q[:2], *shape[2:])) for shape in shared)
        return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]
    if name == "plait.attention_backward":
        grad, q, *shared = (_shape(node.args[i]) for i in range(4))
        k, v = (torch.Size((*q[:2], *shape[2:])) for shape in shared)
        return int(sdpa_backward_flop_count(grad, q, k, v))  # type: ignore[no-untyped-call]
    if name == "plait.scaled_product":
        return 2 * _shape(node.args[0]).numel() * _shape(node.args[1])[1]
    if name == "plait.rounded_product":
        return 2 * _shape(node.args[0]).numel() * _shape(node.args[2])[1]
    if name == "plait.scaled_gradient":
        return 2 * _shape(node.args[0]).numel() * _shape(node.args[1])[0]
    if name in ("plait.grouped_product", "plait.grouped_outer"):
        return 2 * _shape(node.args[0]).numel() * _shape(node.args[1])[-1]
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf,
        (tuple(node.args), dict(node.kwargs)),
    )
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def value_bytes(value: Any) -> int:
    """Bytes of the tensors in a node's value."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    leaves = pytree.tree_leaves(value)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _recurrent_flops(node: fx.Node, *, backward: int | None) -> int:
    """Every step multiplies with both weight matrices; the backward does so for inputs and for weights."""
    x, w_ih, w_hh = (_shape(node.args[index + (backward or 0)]) for index in range(3))
    per_step = 2 * x[1] * (w_ih.numel() + w_hh.numel())
    if backward is None:
        return x[0] * per_step
    return 2 * x[0] * per_step - 2 * x[1] * w_hh.numel()  # the first state needs no gradient
