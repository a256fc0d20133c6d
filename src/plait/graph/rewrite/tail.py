"""The end of the forward, where the loss becomes (total, weight): computed again on the user's live tensors.

In: nodes of the total and the weight, made from nodes of the graph under construction, and the live tensors that the
trace has seen. Out: both as tensors, and the gradients of `total * tangent` with respect to the live tensors they were
made from. From there on autograd differentiates the user's own code, with all of its hooks and functions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.rewrite.functional import out_of_place
from plait.graph.rewrite.marks import Marks
from plait.torch_private.ops import OpOverload, schema_of
from plait.torch_private.tracing import node_of, tracer

_LONGEST = 64
"""Ops between live tensors and the loss, at most: a loss function has a handful."""


class NoTailError(Exception):
    """The ops before the loss cannot be run again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """What the loss is made of."""

    total: Tensor
    weight: Tensor
    sources: tuple[Tensor, ...]
    """Live tensors, with their history."""
    cuts: tuple[Tensor, ...]
    """The same without it: what `total` was computed from."""

    def gradients(self, tangent: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each source with the gradient of `total * tangent` with respect to it."""
        if not self.total.requires_grad:
            return []
        found = torch.autograd.grad(self.total, self.cuts, grad_outputs=tangent, allow_unused=True)
        return [(s, g) for s, g in zip(self.sources, found, strict=True) if g is not None]


def nodes_of(tensors: Iterable[Tensor]) -> dict[fx.Node, Tensor]:
    """The node that stands for each tensor now."""
    found = {}
    for tensor in tensors:
        node = node_of(tensor)
        if node is not None:
            found[node] = tensor
    return found


def run_tail(total: fx.Node, weight: fx.Node, live: dict[fx.Node, Tensor], marks: Marks) -> Tail:
    """Compute both nodes from the live tensors nearest to them."""
    root = tracer().root
    known: dict[fx.Node, Any] = {}
    cuts: list[tuple[Tensor, Tensor]] = []
    num_run = 0

    def value(node: fx.Node) -> Any:
        nonlocal num_run
        if node in known:
            return known[node]
        if node in live:
            tensor = live[node]
            if tensor.requires_grad:
                cut = tensor.detach().requires_grad_()
                cuts.append((tensor, cut))
                tensor = cut
            known[node] = tensor
            return tensor
        if node.op == "get_attr":
            return getattr(root, str(node.target))
        num_run += 1
        target: Any = out_of_place(node.target)
        if node.op != "call_function" or num_run > _LONGEST or not _is_pure(target):
            raise NoTailError
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        marks.at_node(node)
        with torch.set_grad_enabled(node.meta.get("grad", True)):
            known[node] = target(*args, **kwargs)
        return known[node]

    try:
        results = value(total), value(weight)
    finally:
        marks.replay_ends()
    return Tail(
        total=results[0],
        weight=results[1].detach(),
        sources=tuple(source for source, _ in cuts),
        cuts=tuple(cut for _, cut in cuts),
    )


def _is_pure(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return True  # getitem
    return torch.Tag.nondeterministic_seeded not in target.tags and not schema_of(target).is_mutable
