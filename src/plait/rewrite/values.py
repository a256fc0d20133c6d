"""What the values of new nodes are like: shapes, strides and kinds, from what their ops make of their inputs.

In: a node without a value. Out: the value without memory that it has, known by op and inputs as of repeated blocks.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from plait.torch_private import pytree

aten = torch.ops.aten


@dataclass(slots=True)
class Values:
    """Values of new nodes."""

    known: dict[object, Any] = field(default_factory=dict)
    """By op and what it was given."""

    def evaluate(self, made: fx.Node) -> None:
        """What a node's value is like; a view of what does not lie that way is one of a copy."""
        values = [node.meta["val"] for node in made.all_input_nodes]
        mode = next(value.fake_mode for value in _tensors(values))
        args, kwargs = map_arg((made.args, made.kwargs), lambda node: node.meta["val"])
        target: Any = made.target
        key = (target, repr(pytree.tree_map(_seen, (args, kwargs))))
        if key in self.known:  # as in another block
            made.meta["val"] = self.known[key]
            return
        with mode:
            try:
                made.meta["val"] = self.known[key] = target(*args, **kwargs)
            except (RuntimeError, ValueError):
                assert target in (aten.view.default, aten._unsafe_view.default), made.format_node()
                source: Any = made.args[0]
                with made.graph.inserting_before(made):
                    copy = made.graph.call_function(
                        aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                    )
                copy.meta = dict(made.meta)
                copy.meta["val"] = torch.clone(source.meta["val"], memory_format=torch.contiguous_format)
                made.args = (copy, *made.args[1:])
                made.meta["val"] = target(copy.meta["val"], *args[1:])


def _seen(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype)


def _tensors(values: list[Any]) -> list[Any]:
    return [v for v in values if isinstance(v, torch.Tensor)] or [
        v
        for value in values
        if isinstance(value, (tuple, list))
        for v in value
        if isinstance(v, torch.Tensor)
    ]


def same_inputs(made: fx.Node, old: fx.Node) -> bool:
    """Whether two nodes are given values that lie alike."""
    pairs = zip(made.all_input_nodes, old.all_input_nodes, strict=False)
    return len(made.all_input_nodes) == len(old.all_input_nodes) and all(
        a.meta["val"] is b.meta["val"] or _like(a.meta["val"], b.meta["val"]) for a, b in pairs
    )


def _like(a: Any, b: Any) -> bool:
    return (
        isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.stride() == b.stride()
        and a.shape == b.shape and a.storage_offset() == b.storage_offset()
    )  # fmt: skip
