"""A segment as a graph of its own, as Inductor takes it: tensors in, tensors out.

In: a segment, what its inputs are like, which of its outputs are written to memory that is given. Out: a graph that
takes its tensors, those in tuples one by one, then that memory, and returns tensors the same way. Numbers are written
into it. Gradients of products that nobody else reads are left in float32 by the product itself.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.ops import batch_norm, gelu, scaled, summed
from plait.graph.ops.product_into import PRODUCT_INTO, WIDE_PRODUCT
from plait.program.program import Segment
from plait.program.segment.codegen import Fill
from plait.program.segment.summed import with_sums
from plait.torch_private.inductor import InductorError, Like

_OF_OURS = {**batch_norm.DECOMPOSITIONS, **scaled.IMPLEMENTATIONS}
"""Ops of our own that Inductor may look into."""
_ON_GPUS = {**_OF_OURS, **gelu.DECOMPOSITIONS}
"""The same, and ops that are better for a GPU than as torch decomposes them."""

Given = Like | int | None | tuple["Given", ...]
"""What an input is: a tensor like this, or this very number, or several in a tuple."""


def decompositions_for(inputs: Sequence[Like]) -> Mapping[Any, Callable[..., Any]]:
    """How ops are taken apart in a graph of such inputs."""
    return _ON_GPUS if any(like.device.type == "cuda" for like in inputs) else _OF_OURS


def given_of(value: Any) -> Given:
    """What an input is like; an InductorError where code cannot be made for it."""
    if isinstance(value, Tensor):
        return Like.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(given_of, value))
    if value is None or isinstance(value, int):
        return value
    raise InductorError(f"it takes a {type(value).__name__}, which is neither a tensor nor a whole number")


def likes_of(given: Given) -> list[Like]:
    """The tensors in an input, in order."""
    if isinstance(given, tuple):
        return [like for entry in given for like in likes_of(entry)]
    return [given] if isinstance(given, Like) else []


def tensors_of(value: Any) -> list[Tensor]:
    """The same, of the input itself."""
    if isinstance(value, (tuple, list)):
        return [tensor for entry in value for tensor in tensors_of(entry)]
    return [value] if isinstance(value, Tensor) else []


def graph_of(
    segment: Segment,
    given: Sequence[Given],
    filled: Sequence[tuple[fx.Node, Fill]],
    device: torch.device,
) -> fx.GraphModule:
    """The segment alone, on `device`; outputs that are written to given memory are inputs at the end instead."""
    graph = fx.Graph()
    copies: dict[str, Any] = {
        name: _placeholders(graph, name, entry) for name, entry in zip(segment.inputs, given, strict=True)
    }
    memory = {node: graph.placeholder(f"{fill.output}_into") for node, fill in filled}
    skipped = {fill.output for _, fill in filled}
    by_fill = dict(filled)
    dropped = _between(by_fill)
    wide = find_wide(segment, by_fill) if device.type == "cuda" else {}
    widened = set(wide.values())
    for node in segment.nodes:
        if node in by_fill:
            into: Any = memory[node]
            if by_fill[node].shape is not None:
                into = graph.call_function(
                    torch.ops.aten.view.default, (into, list(by_fill[node].shape or ()))
                )
            if by_fill[node].transposed:
                into = graph.call_function(torch.ops.aten.t.default, (into,))
            operands = [copies[arg.name] for arg in node.args if isinstance(arg, fx.Node)]
            graph.call_function(PRODUCT_INTO, (*operands, into))
        elif node in widened:
            copies[node.name] = copies[node.all_input_nodes[0].name]
        elif node in wide:
            factors = [copies[arg.name] for arg in node.args if isinstance(arg, fx.Node)]
            copies[node.name] = graph.call_function(_WIDE[node.target], tuple(factors))
        elif node not in dropped:
            copies[node.name] = copied = graph.node_copy(node, lambda entry: copies[entry.name])
            if isinstance(copied.kwargs.get("device"), torch.device):
                copied.kwargs = {**copied.kwargs, "device": device}
    made = {node.name: node.meta["val"] for node in segment.nodes}
    outputs = [_parts(copies[name], made[name]) for name in segment.outputs if name not in skipped]
    graph.output(tuple(part for parts in outputs for part in parts))
    if device.type == "cuda" and summed.has_kernels():
        with_sums(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def _placeholders(graph: fx.Graph, name: str, given: Given) -> Any:
    if isinstance(given, tuple):
        return tuple(_placeholders(graph, f"{name}_{at}", entry) for at, entry in enumerate(given))
    if not isinstance(given, Like):
        return given
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device="meta")
    return node


def _parts(node: fx.Node, like: Any) -> list[fx.Node]:
    """The tensors of an output, of which `like` is what it was traced as."""
    if isinstance(like, Tensor):
        return [node]
    if not isinstance(like, (tuple, list)):
        raise InductorError(f"it makes a {type(like).__name__}, which is not a tensor")
    found = []
    for at, entry in enumerate(like):
        if entry is not None:
            found += _parts(node.graph.call_function(operator.getitem, (node, at)), entry)
    return found


def put_together(like: Any, parts: Iterator[Tensor]) -> Any:
    """An output of a segment from its tensors, of which as many are taken as belong to it."""
    if isinstance(like, (tuple, list)):
        return tuple(put_together(entry, parts) for entry in like)
    return None if like is None else next(parts)


def find_wide(segment: Segment, filled: Mapping[fx.Node, Fill]) -> dict[fx.Node, fx.Node]:
    """Products in 16 bits that are, maybe through views, gradients in float32 and nothing else; the cast of each."""
    found = {}
    inside = set(segment.nodes)
    for cast in segment.nodes:
        if cast.target is not torch.ops.aten._to_copy.default or cast.meta["val"].dtype != torch.float32:
            continue
        if any(user.op != "output" for user in cast.users):  # else the cast is fused with what reads it
            continue
        source = cast.args[0]
        while isinstance(source, fx.Node) and source in inside and len(source.users) == 1:
            if source.target in _WIDE and source not in filled:
                if source.meta["val"].dtype == torch.bfloat16 and source.name not in segment.outputs:
                    found[source] = cast
                break
            if source.target not in _VIEWS or source.name in segment.outputs:
                break
            source = source.args[0]
    return found


_WIDE: Mapping[Any, Any] = {
    torch.ops.aten.mm.default: WIDE_PRODUCT,
    scaled.SCALED_GRADIENT: scaled.WIDE_GRADIENT,
}
"""Products that may give float32 themselves."""
_VIEWS = (torch.ops.aten.t.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _between(filled: Mapping[fx.Node, Fill]) -> set[fx.Node]:
    """Views that lead from a filled product to its output."""
    found: set[fx.Node] = set()
    for node, fill in filled.items():
        current = node
        while current.name != fill.output:
            current = next(iter(current.users))
            found.add(current)
    return found
