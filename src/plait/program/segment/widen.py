"""Numbers that the forward widened are widened again in the backward, so that the short ones are kept in between.

In: a local graph. Out: the same, in which no cast from 16 bits to 32 leads from the forward to the backward. A norm of
16-bit activations computes in float32: its backward would read twice the bytes, and the forward write three times.
Compiled, the cast is a part of what reads it.
"""

import torch
from torch import Tensor, fx

from plait.graph.graph import Graph
from plait.graph.storage import owner_of, storage_bytes
from plait.program.local.local_graph import LocalGraph
from plait.program.segment.recompute import Again, forward_nodes, frontier, is_backward, recompute
from plait.program.stage.where import Stages


def widen_again(source: Graph, local: LocalGraph, stages: Stages | None = None) -> LocalGraph:
    """Let the backward widen for itself; `local`, whose graph is changed in place."""
    found = [node for node in forward_nodes(local) if _widens(node) and any(map(is_backward, node.users))]
    if not found:
        return local
    bound = frontier(source, local, stages)
    again = Again(
        nodes=frozenset(node.name for node in found if node not in bound),
        ops={},
        order=tuple(node.name for node in local.graph.nodes),
    )
    return recompute(source, local, again, stages)


def _widens(node: fx.Node) -> bool:
    """Whether it casts what the forward computed, and to more bytes than are kept then.

    Parameters are not asked for once more: where they are gathered they may be gone by then.
    """
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    given = node.all_input_nodes[0]
    short, wide = given.meta.get("val"), node.meta["val"]
    return (
        owner_of(given).op == "call_function"
        and isinstance(short, Tensor)
        and short.dtype.is_floating_point
        and wide.dtype.is_floating_point
        and storage_bytes(short) < storage_bytes(wide)
    )
