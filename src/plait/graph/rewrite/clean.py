"""Rid a traced step of what has no meaning in a graph that is run without autograd.

In: a functional graph of forward and backward. Out: the same, changed in place, its constants kept with their nodes.
"""

import torch
from torch import fx

from plait.torch_private.ops import OpOverload, schema_of


def clean(module: fx.GraphModule) -> None:
    """Drop detaches, checks and dead code; keep the values of constant tensors with their nodes."""
    graph = module.graph
    _drop_detach(graph)
    _drop_checks(graph)
    _name_squeezed(graph)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["constant"] = getattr(module, str(node.target))
            node.meta.setdefault("val", node.meta["constant"])


def _drop_detach(graph: fx.Graph) -> None:
    """The joint graph is run without autograd, so detach and alias are the identity."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (
            torch.ops.aten.detach.default,
            torch.ops.aten.alias.default,
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _drop_checks(graph: fx.Graph) -> None:
    """Ops that return nothing only look at what others made, as `torch.linalg.inv` looks for a singular matrix.

    Without them such a matrix gives a loss that is not finite, which ends the run as well. Those of torch's profiler
    (`record_function`) compute nothing either.
    """
    for node in reversed(list(graph.nodes)):
        if not isinstance(node.target, OpOverload):
            continue
        if not schema_of(node.target).returns or node.target.namespace == "profiler":
            graph.erase_node(node)


def _name_squeezed(graph: fx.Graph) -> None:
    """Squeezes drop the dims that have one entry here, not those of which one rank of several has one."""
    aten = torch.ops.aten
    for target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
        for node in graph.find_nodes(op="call_function", target=target):
            shape = node.args[0].meta["val"].shape
            named = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
            dims = [named] if isinstance(named, int) else named
            node.target = aten.squeeze.dims
            node.args = (node.args[0], [dim for dim in dims if shape and shape[dim] == 1])
