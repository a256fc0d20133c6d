"""Graphs without writes in place.

In: a traced graph module. Out: the same computation where every op returns new tensors; writes to inputs become
trailing `copy_` nodes. Our own notes on the nodes are carried over.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.capture.marks import Marks
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


def functionalize(module: fx.GraphModule, inputs: Sequence[Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """The same graph without writes in place; writes to inputs end as trailing `copy_` nodes."""
    marks = Marks()

    class Replay(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            marks.at_node(node)
            return super().run_node(node)

    def run(*flat: Tensor) -> Any:
        return Replay(module).run(*flat)

    with mode, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional = make_fx(
            torch.func.functionalize(run, remove="mutations"),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )(*[tensor.detach() for tensor in inputs])
    marks.copy_meta(functional.graph)
    return functional
