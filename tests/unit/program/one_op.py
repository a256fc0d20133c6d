"""Run one op on several ranks in one process, cut as a strategy says, and put its outputs together again.

In: an op call on real tensors, a strategy, how an axis is cut. Out: the op's global outputs as the ranks computed
them. The placements are given by hand; the local graphs are those of the real localizer.
"""

import operator
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from plait.graph.graph import BatchLayout, Graph
from plait.program.local.communicate import all_gather, all_reduce, reduce_scatter
from plait.program.local.localize import localize
from plait.program.place.placement import AxisShares, Partial, Placement, Replicate, Strategy
from plait.program.place.propagate import Placements

SCALAR = "total"
"""A placeholder that stands for the loss, which a graph must have."""


@dataclass(frozen=True)
class Zeros:
    """An argument that the graph itself makes: zeros of this shape."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class OneOp:
    """A graph of one op, with the real tensors that enter it."""

    graph: Graph
    node: fx.Node
    inputs: dict[str, Tensor]
    outputs: list[fx.Node]
    """One per output tensor that is present."""
    positions: list[int]
    """Their positions among the op's outputs."""
    key: str | None
    """The input that holds the key of random numbers: each rank has its own first sample there."""

    @cached_property
    def expected(self) -> list[Tensor]:
        """What the op gives when nothing is cut."""
        result = _run_whole(self)
        return [
            entry
            for entry in ([result] if isinstance(result, Tensor) else result)
            if isinstance(entry, Tensor)
        ]


def one_op(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, key: Tensor | None = None
) -> OneOp:
    """The graph of one call; every tensor argument becomes a placeholder."""
    mode = FakeTensorMode()
    graph = fx.Graph()
    inputs: dict[str, Tensor] = {}
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    nodes: list[Any] = []
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for index, tensor in enumerate([*tensors, torch.ones((), dtype=torch.float64)]):
        name = SCALAR if index == len(tensors) else f"input{index}"
        placeholder = graph.placeholder(name)
        placeholder.meta |= {"val": mode.from_tensor(tensor), "phase": "forward"}
        inputs[placeholder.name] = tensor
        nodes.append(placeholder)
    names = iter(nodes)
    filled = [next(names) if isinstance(leaf, Tensor) else _made(graph, leaf, mode) for leaf in leaves]
    new_args, new_kwargs = pytree.tree_unflatten(filled, spec)
    node = graph.call_function(target, new_args, new_kwargs)
    _describe(node, mode)
    outputs, positions = [], []
    values = [node.meta["val"]] if isinstance(node.meta["val"], Tensor) else list(node.meta["val"])
    for position, value in enumerate(values):
        if isinstance(value, Tensor):
            outputs.append(node)
            positions.append(position)
            if not isinstance(node.meta["val"], Tensor):
                outputs[-1] = graph.call_function(operator.getitem, (node, position))
                _describe(outputs[-1], mode)
    graph.output(tuple(outputs))
    layout = BatchLayout(spec=spec, is_tensor=(), has_samples=())
    made = Graph(
        graph=graph, inputs=(), batch=layout, num_samples=1, total=SCALAR, weight=SCALAR, weight_is_early=True,
        static_weight=None, gradients={f"out{i}": n.name for i, n in zip(positions, outputs, strict=True)},
        new_buffers={}, aliases={}, unused=(), notices=(), precision="fp32",
    )  # fmt: skip
    named = next((name for name, tensor in inputs.items() if tensor is key), None)
    return OneOp(made, node, inputs, outputs, positions, named)


def _made(graph: fx.Graph, leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, Zeros):
        return leaf
    node = graph.call_function(torch.ops.aten.zeros.default, (list(leaf.shape),), {"dtype": torch.float64})
    _describe(node, mode)
    return node


def _describe(node: fx.Node, mode: FakeTensorMode) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        node.meta |= {"val": node.target(*args, **kwargs), "phase": "forward"}  # type: ignore[operator]


def _run_whole(op: OneOp) -> Any:
    values: dict[fx.Node, Any] = {}
    for node in op.graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = op.inputs[node.name]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values[op.node]


def run_on_ranks(
    op: OneOp, strategy: Strategy, axis: AxisShares, *, arrives: Placement | None = None
) -> list[list[Tensor]]:
    """For every output, the whole tensor as each rank has it in the end; inputs arrive as the op wants them."""
    placed = strategy.inputs if arrives is None else (arrives,) * len(strategy.inputs)
    placements = _placements(op, strategy, axis, placed)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        leaf for leaf in pytree.tree_leaves((op.node.args, op.node.kwargs)) if isinstance(leaf, fx.Node)
    ]
    shares: dict[str, list[Tensor]] = {SCALAR: [op.inputs[SCALAR]] * axis.size}
    for node, placement in zip(tensors, placed, strict=True):
        if node.name in op.inputs:
            shares[node.name] = distribute(op.inputs[node.name], placement, axis, generator)
    if op.key is not None:
        shares[op.key] = [
            _with_first_sample(op.inputs[op.key], axis.offset(rank)) for rank in range(axis.size)
        ]
    ranks = []
    for rank in range(axis.size):
        local = localize(op.graph, [placements], [rank], local_batch_norm=False)
        given: dict[str, Any] = {name: parts[rank] for name, parts in shares.items()}
        given[f"offset_{axis.name}"] = axis.offset(rank)
        ranks.append(_run_rank(local.graph, given))
    results = _in_lock_step(ranks)
    whole = []
    for index, node in enumerate(op.outputs):
        parts = [result[2 + index] for result in results]  # after total and weight
        is_sum = isinstance(placements.outputs[node][0], Partial)
        whole.append([sum(parts[1:], start=parts[0])] * axis.size if is_sum else parts)
    return whole


def _placements(op: OneOp, strategy: Strategy, axis: AxisShares, placed: Sequence[Placement]) -> Placements:
    outputs: dict[fx.Node, tuple[Placement, ...]] = {}
    strategies: dict[fx.Node, Strategy] = {}
    for node in op.graph.graph.nodes:
        outputs[node] = (Replicate(),)
        if node.op == "call_function":
            strategies[node] = Strategy((), (Replicate(),))
    tensors = [
        leaf for leaf in pytree.tree_leaves((op.node.args, op.node.kwargs)) if isinstance(leaf, fx.Node)
    ]
    for node, placement in zip(tensors, placed, strict=True):
        if node.op == "placeholder":
            outputs[node] = (placement,)
    outputs[op.node], strategies[op.node] = strategy.outputs, strategy
    for position, node in zip(op.positions, op.outputs, strict=True):
        if node is not op.node:
            outputs[node] = (strategy.outputs[position],)
    return Placements(axis=axis, strategies=strategies, outputs=outputs, gathered=())


def distribute(x: Tensor, placement: Placement, axis: AxisShares, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds of a tensor."""
    if isinstance(placement, Partial):
        rest = [torch.randn(x.shape, generator=generator).mul(5).to(x.dtype) for _ in axis.units[1:]]
        return [x - sum(rest, start=torch.zeros_like(x)), *rest]
    if isinstance(placement, Replicate):
        return [x] * axis.size
    pieces: list[list[Tensor]] = [[] for _ in axis.units]
    for part in x.split(x.shape[placement.dim] // placement.outer, placement.dim):
        sizes = [axis.local(part.shape[placement.dim], rank) for rank in range(axis.size)]
        for rank, piece in enumerate(part.split(sizes, placement.dim)):
            pieces[rank].append(piece)
    return [torch.cat(parts, placement.dim).contiguous() for parts in pieces]


def _with_first_sample(key: Tensor, first: int) -> Tensor:
    return torch.cat([key[:2], key.new_tensor([first])])


def _run_rank(graph: fx.Graph, given: dict[str, Any]) -> Generator[tuple[Any, ...], Tensor, list[Any]]:
    """Runs a local graph; hands every collective to the caller, who sends its result back."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target in (all_reduce, all_gather, reduce_scatter):
                values[node] = yield (node.target, *args)
            else:
                values[node] = node.target(*args, **kwargs)
        elif node.op == "output":
            return list(fx.map_arg(node.args[0], values.__getitem__))
    raise AssertionError("a graph without an output")


@torch.no_grad()
def _in_lock_step(ranks: list[Generator[tuple[Any, ...], Tensor, list[Any]]]) -> list[list[Any]]:
    replies: list[Tensor | None] = [None] * len(ranks)
    while True:
        asked, done = [], []
        for rank, reply in zip(ranks, replies, strict=True):
            try:
                asked.append(rank.send(reply))  # type: ignore[arg-type]
            except StopIteration as stop:
                done.append(stop.value)
        if done:
            assert not asked, "some ranks communicate where others have ended"
            return done
        assert len({(entry[0], *entry[2:3]) for entry in asked}) == 1, "ranks start different collectives"
        tensors = [entry[1] for entry in asked]
        if asked[0][0] is all_reduce:
            replies = [sum(tensors[1:], start=tensors[0])] * len(ranks)
        elif asked[0][0] is reduce_scatter:
            _, _, _, dim, extents, _ = asked[0]
            replies = list(sum(tensors[1:], start=tensors[0]).split(list(extents), dim))
        else:
            _, _, _, dim, extents = asked[0]
            assert [t.shape[dim] for t in tensors] == list(extents)
            replies = [torch.cat(tensors, dim)] * len(ranks)
