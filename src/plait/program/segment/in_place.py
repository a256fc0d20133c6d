"""Pointwise ops that write over an operand which nobody reads afterwards.

In: the nodes of a segment, and what dies after each. Out: by node, the operand that it writes over. Only memory that
the segment made itself is written over: never an input, an output, or what some live view shows. The numbers are the
same; the most that is alive at once is less.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx

from plait.graph.op_family import is_view
from plait.graph.storage import is_item, shows_input
from plait.torch_private.ops import OpOverload, schema_of

_aten = torch.ops.aten
_UNARY = (
    "abs",
    "cos",
    "exp",
    "gelu",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "tanh",
)
_BINARY = ("add", "div", "mul", "sub")
_BACKWARD = ("gelu", "sigmoid", "silu", "tanh", "threshold")
IN_PLACE: Mapping[OpOverload, OpOverload] = {
    **{getattr(_aten, name).default: getattr(_aten, f"{name}_").default for name in _UNARY},
    **{
        getattr(getattr(_aten, name), kind): getattr(getattr(_aten, f"{name}_"), kind)
        for name in _BINARY
        for kind in ("Tensor", "Scalar")
    },
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
    _aten.pow.Tensor_Scalar: _aten.pow_.Scalar,
}
"""By op, the one that writes its result over its first operand."""
OVER_GRADIENT: Mapping[OpOverload, OpOverload] = {
    getattr(_aten, f"{name}_backward").default: getattr(_aten, f"{name}_backward").grad_input
    for name in _BACKWARD
}
"""By op, the one that writes where its argument `grad_input` says: over the gradient that it is given."""


def written_over(
    nodes: Sequence[fx.Node], outputs: Iterable[str], dying: Mapping[fx.Node, Sequence[str]]
) -> dict[fx.Node, fx.Node]:
    """By node that writes over an operand of its own: that operand."""
    inside, kept = set(nodes), set(outputs)
    memories: dict[fx.Node, frozenset[fx.Node]] = {}
    shown: Counter[fx.Node] = Counter()
    """By owner of memory, how many live names may show it; an output never dies."""
    found: dict[fx.Node, fx.Node] = {}
    names = {node.name: node for node in nodes}
    for node in nodes:
        operand = node.args[0] if node.target in IN_PLACE or node.target in OVER_GRADIENT else None
        if isinstance(operand, fx.Node) and operand in inside and operand.name in dying.get(node, ()):
            others = [other for other in node.all_input_nodes if other is not operand]
            apart = all(operand not in memories.get(other, ()) for other in others)
            once = sum(arg is operand for arg in (*node.args, *node.kwargs.values())) == 1
            if shown[operand] == 1 and once and apart and _is_made(operand) and _is_like(node, operand):
                found[node] = operand
        memories[node] = _memories(node, memories)
        shown.update(memories[node])
        for name in dying.get(node, ()):
            if name in names and name not in kept:
                shown.subtract(memories[names[name]])
    return found


def _memories(node: fx.Node, known: Mapping[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    """Whose memory a value may lie in: of a view, what it shows; a function that is no op of torch's (a shard that is
    taken, dims that are split) may return its inputs, views of them, or tensors of its own."""
    given = [known.get(entry, frozenset((entry,))) for entry in node.all_input_nodes]
    if shows_input(node):
        return given[0]
    maker = node.args[0] if is_item(node) else node
    if isinstance(maker, fx.Node) and maker.op == "call_function" and schema_of(maker.target) is None:
        return frozenset((node,)).union(*given)
    return frozenset((node,))


def _is_made(node: fx.Node) -> bool:
    """Whether an op of torch's makes a tensor of its own."""
    schema = schema_of(node.target)
    return (
        schema is not None
        and schema.name.startswith("aten::")
        and not is_item(node)
        and not is_view(node.target)
        and all(result.alias_info is None for result in schema.returns)
    )


def _is_like(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the result fits where the operand lies, every element in a place of its own."""
    made, given = node.meta.get("val"), operand.meta.get("val")
    if not isinstance(made, Tensor) or not isinstance(given, Tensor) or made.numel() == 0:
        return False
    dense = given.untyped_storage().nbytes() == given.numel() * given.element_size()
    return (
        dense
        and not given.is_sparse
        and made.dtype == given.dtype
        and made.shape == given.shape
        and made.stride() == given.stride()
    )
