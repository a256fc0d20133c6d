"""Graphs without writes in place.

In: a traced graph module. Out: the same computation where every op returns new tensors; writes to inputs become
trailing `copy_` nodes. Our own notes on the nodes are carried over.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.rewrite.marks import Marks
from plait.torch_private.fake import FakeTensorMode
from plait.torch_private.ops import OpOverload, schema_of
from plait.torch_private.tracing import make_fx


def mutates(graph: fx.Graph) -> bool:
    """Whether some op writes in place."""
    return any(
        isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
        for node in graph.nodes
        if node.op == "call_function"
    )


def out_of_place(target: Any) -> Any:
    """The op that returns what `target` would write into its first argument; other ops are returned as they are."""
    if not isinstance(target, OpOverload) or not schema_of(target).is_mutable:
        return target
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, schema_of(target).overload_name or "default", target)


def functionalize(module: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """The same graph without writes in place; writes to inputs end as trailing `copy_` nodes."""
    marks = Marks()
    inputs = [node.meta["val"].detach() for node in module.graph.nodes if node.op == "placeholder"]

    class Replay(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            marks.at_node(node)
            return super().run_node(node)

    def run(*flat: Tensor) -> Any:
        return Replay(module).run(*flat)

    def traced(*flat: Tensor) -> Any:
        with marks.on_nodes():
            return torch.func.functionalize(run, remove="mutations")(*flat)

    with mode, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_fx(traced, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
