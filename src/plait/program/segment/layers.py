"""A segment as pieces that repeat, so that layers which are alike are compiled once.

In: a segment. Out: pieces which, run one after the other, are the segment; the segment itself where little repeats.
Pieces end after the last product (or convolution, or attention) of a numbered module, `blocks.7` or `layer1.0`: its
result lies in memory in any case, and what follows it is fused with the beginning of the next layer; but what only
makes a gradient of it, views, sums and a cast, stays with it.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.op_family import family
from plait.program.program import Segment
from plait.program.segment.codegen import make_segment

Run = Callable[..., tuple[Any, ...]]
_PRODUCTS = frozenset({"matmul", "convolution", "attention", "recurrent"})
"""Kinds of ops that a compiler calls, and does not fuse with others."""
aten = torch.ops.aten
_ENDINGS = frozenset(
    {aten.t.default, aten.view.default, aten._unsafe_view.default, aten._to_copy.default}
    | {aten.sum.dim_IntList}
)
"""Ops between a product and the gradient of a weight, or between a gradient and that of a bias."""


def text_of(segment: Segment) -> object:
    """What a segment computes, whatever its nodes are called."""
    numbers = {name: index for index, name in enumerate(segment.inputs)}
    for node in segment.nodes:
        numbers.setdefault(node.name, len(numbers))

    def known(value: Any) -> str:
        return repr(fx.map_arg(value, lambda entry: _Number(numbers[entry.name])))

    calls = tuple((str(node.target), known(node.args), known(dict(node.kwargs))) for node in segment.nodes)
    return (len(segment.inputs), calls, tuple(numbers[name] for name in segment.outputs))


class _Number(str):
    """The place of a node among those of its segment."""

    __slots__ = ()

    def __new__(cls, number: int) -> "_Number":
        return super().__new__(cls, f"%{number}")


def pieces_of(segment: Segment, device: torch.device) -> list[Segment]:
    """The pieces of a segment, fewer than half of which differ; else the segment alone."""
    nodes = _gathered(segment.nodes)
    ends = _ends(nodes)
    if len(ends) < 4:
        return [segment]
    bounds = list(zip([0, *ends], [*ends, len(nodes)], strict=True))
    pieces = [_piece(segment, nodes, begin, end, device) for begin, end in bounds if begin < end]
    if 2 * len({text_of(piece) for piece in pieces}) > len(pieces):
        return [segment]
    return pieces


def _ends(nodes: Sequence[fx.Node]) -> list[int]:
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        layer = _layer(str(node.meta.get("module", "")))
        if layer and family(node.target) in _PRODUCTS:
            last[layer] = index
    ends = []
    for index in last.values():
        end = index + 1
        while end < len(nodes) and (nodes[end].target is operator.getitem or _leads_out(nodes[end])):
            end += 1
        ends.append(end)
    return sorted(set(ends))


def _gathered(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes in an order in which those that lead out follow at once what they are computed from."""
    order: dict[fx.Node, None] = {}
    inside, leading = set(nodes), {node for node in nodes if _leads_out(node)}

    def place(node: fx.Node) -> None:
        order[node] = None
        for user in [user for user in node.users if user in leading]:
            known = all(used in order or used not in inside for used in user.all_input_nodes)
            if known and user not in order:
                place(user)

    for node in nodes:
        if node not in order:
            place(node)
    return list(order)


def _leads_out(node: fx.Node) -> bool:
    """Whether a node is on the way to outputs of the whole step, and to nothing else."""
    return node.target in _ENDINGS and all(user.op == "output" or _leads_out(user) for user in node.users)


def _layer(module: str) -> str:
    """`encoder.layer.5` of `encoder.layer.5.attention.self`; nothing where no name is a number."""
    parts = module.split(".")
    found = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if found is None else ".".join(parts[: found + 1])


def _piece(
    segment: Segment, all_nodes: Sequence[fx.Node], begin: int, end: int, device: torch.device
) -> Segment:
    nodes = list(all_nodes[begin:end])
    inside = set(nodes)
    later = {used.name for node in all_nodes[end:] for used in node.all_input_nodes}
    later |= set(segment.outputs)
    inputs = dict.fromkeys(used.name for node in nodes for used in node.all_input_nodes if used not in inside)
    outputs = [node.name for node in nodes if node.name in later]
    return make_segment(f"{segment.name}[{begin}:{end}]", segment.phase, nodes, list(inputs), outputs, device)


def chain(segment: Segment, pieces: Sequence[Segment], run_of: Callable[[Segment], Run]) -> Run:
    """What runs a segment piece by piece; values are dropped after the last piece that reads them."""
    last = {name: at for at, piece in enumerate(pieces) for name in piece.inputs}
    kept = set(segment.outputs)
    reads = [
        [(name, last[name] == at and name not in kept) for name in piece.inputs]
        for at, piece in enumerate(pieces)
    ]
    filled = [[piece.outputs[position] for position in piece.fillable] for piece in pieces]
    runs = [run_of(piece) for piece in pieces]
    fillable = [segment.outputs[position] for position in segment.fillable]

    def run(args: list[Any], into: Sequence[Tensor | None] = (None,) * len(fillable)) -> tuple[Any, ...]:
        values = dict(zip(segment.inputs, args, strict=True))
        args.clear()
        memory = {name: given for name, given in zip(fillable, into, strict=True) if given is not None}
        for piece, wanted, fills, function in zip(pieces, reads, filled, runs, strict=True):
            taken = [values.pop(name) if drops else values[name] for name, drops in wanted]
            given = ([memory.get(name) for name in fills],) if fills else ()
            made = function(taken, *given)
            values.update(zip(piece.outputs, made, strict=True))
        for name, slot in memory.items():
            if values[name] is not slot:
                values[name] = slot.copy_(values[name])
        return tuple(values[name] for name in segment.outputs)

    return run
