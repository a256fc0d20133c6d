"""What is left of an op's memory traffic where its segment is compiled.

In: the nodes of a segment, and what leaves it. Out: for every op that a compiler fuses with its neighbours, the share
of its own traffic that still reaches memory. What one op writes for the next of the same kernel does not; what a
product, an attention or another segment writes or reads does. It never asks a compiler: which ops end up in one kernel
is a guess by their kinds.
"""

from collections.abc import Collection, Sequence, Set

from torch import fx

from plait.graph.cost import value_bytes
from plait.graph.op_family import family
from plait.graph.storage import is_item, owner_of
from plait.program.cost.op_time import node_work, op_name

_FUSED = ("elementwise", "normalization", "softmax", "loss", "reduction", "copy", "creation")
_FUSED_TOO = ("select_backward", "slice_backward", "cat", "stack", "constant_pad_nd")


def fused_shares(nodes: Sequence[fx.Node], outputs: Collection[str]) -> dict[fx.Node, float]:
    """From 0, all of it stays within a kernel, to 1; ops that are not fused are left out."""
    fused = {node for node in nodes if _is_fused(node)}
    shares = {}
    for node in fused:
        work = node_work(node)
        if work is None:
            continue
        moved = sum(
            value_bytes(source.meta.get("val"))
            for source in node.all_input_nodes
            if _base(source) not in fused and not _is_read_before(_base(source), node, fused)
        )
        if _is_written(node, fused, outputs):
            moved += value_bytes(node.meta["val"])
        shares[node] = min(moved / work.num_bytes, 1.0)
    return shares


def _is_fused(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        family(node.target) in _FUSED or op_name(node.target) in _FUSED_TOO
    )


def _base(node: fx.Node) -> fx.Node:
    """The op that made it, through views and whichever of its results."""
    owner = owner_of(node)
    return owner.all_input_nodes[0] if is_item(owner) else owner


def _is_read_before(source: fx.Node, node: fx.Node, fused: Set[fx.Node]) -> bool:
    """Whether an op of the same kernel, one that `node` takes a value of, reads it anyway."""
    makers = {_base(entry) for entry in node.all_input_nodes} & fused
    return any(source in map(_base, maker.all_input_nodes) for maker in makers)


def _is_written(node: fx.Node, fused: Collection[fx.Node], outputs: Collection[str]) -> bool:
    """Whether somebody outside of its kernel reads it, itself or through a view."""
    if node.name in outputs:
        return True
    return any(
        _is_written(user, fused, outputs) if family(user.target) == "view" else user not in fused
        for user in node.users
    )
