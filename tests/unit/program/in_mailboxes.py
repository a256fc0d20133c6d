"""Run the local graphs of all ranks of a mesh in one process, and put together what leaves them.

In: a graph, the placements on every axis, the whole tensors that enter. Out: total, weight, gradients and new buffers
as the ranks computed them, every collective through the mailboxes of the serial interpreter.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from tests.unit.program.one_op import OneOp, distribute
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from plait.graph.graph import Graph
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA
from plait.program.instructions import Collective
from plait.program.local import communicate
from plait.program.local.local_graph import LocalGraph
from plait.program.local.localize import localize
from plait.program.place.placement import AxisShares, Partial, Placement, R, Replicate, Shard, Strategy
from plait.program.place.propagate import Placements
from plait.run.interpret.serial import Mailboxes, SerialLinks

_FIELDS: dict[Any, tuple[str, ...]] = {
    communicate.all_reduce: (),
    communicate.all_gather: ("dim", "extents"),
    communicate.reduce_scatter: ("dim", "extents", "own"),
    communicate.halo: ("dim", "before", "after", "fill"),
    communicate.halo_add: ("dim", "before", "after"),
}


def run_graph(
    graph: Graph, chosen: Sequence[Placements], inputs: Mapping[str, Any], *, local_batch_norm: bool = False
) -> dict[str, Tensor]:
    """Everything that leaves the graph, whole. `inputs` are by placeholder; a batch enters cut by samples alone."""
    axes = [placements.axis for placements in chosen]
    mesh = Mesh(axes=tuple((axis.name, axis.size) for axis in axes))
    nodes, batch = graph.nodes(), {entry.node for entry in graph.inputs_of("batch")}
    shares = {}
    for name, value in inputs.items():
        placed = [R if name in batch and p.axis.name != DATA else p.of(nodes[name]) for p in chosen]
        shares[name] = _distribute(value, placed, axes, mesh)
    boxes = Mailboxes(mesh)
    locals_, running = [], {}
    for rank in range(mesh.size):
        local = localize(graph, chosen, mesh.coordinates(rank), local_batch_norm=local_batch_norm)
        given: dict[str, Any] = {name: parts[rank] for name, parts in shares.items()}
        for axis, coordinate in zip(axes, mesh.coordinates(rank), strict=True):
            given[f"offset_{axis.name}"] = axis.offset(coordinate)
        locals_.append(local)
        running[rank] = _run_rank(local.graph, given, SerialLinks(boxes, rank))
    return _whole(graph, locals_, _take_turns(running), axes)


def _run_rank(
    graph: fx.Graph, given: Mapping[str, Any], links: SerialLinks
) -> Generator[None, None, list[Any]]:
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target in _FIELDS:
                handle = links.start(_collective(node.target, args), args[0].clone())
                while not handle.ready():
                    yield
                values[node] = handle.result()
            else:
                values[node] = node.target(*args, **kwargs)
            shape = getattr(node.meta["val"], "shape", None)
            assert shape is None or values[node].shape == shape, f"{node}: {values[node].shape}, not {shape}"
        elif node.op == "output":
            return list(fx.map_arg(node.args[0], values.__getitem__))
    raise AssertionError("a graph without an output")


def _collective(target: Any, args: Sequence[Any]) -> Collective:
    _, axis, *rest = args
    fields = dict(zip(_FIELDS[target], rest, strict=True))
    fields.pop("own", None)
    if "extents" in fields:
        fields["extents"] = tuple(fields["extents"])
    name = target.__name__
    return Collective(id=0, name=name, kind="communication", op=name, axis=axis, **fields)


@torch.no_grad()
def _take_turns(running: dict[int, Generator[None, None, list[Any]]]) -> list[list[Any]]:
    done: dict[int, list[Any]] = {}
    for _ in range(100_000):
        for rank in [rank for rank in running if rank not in done]:
            try:
                next(running[rank])
            except StopIteration as stop:
                done[rank] = stop.value
        if len(done) == len(running):
            return [done[rank] for rank in sorted(done)]
    raise AssertionError(f"ranks {sorted(set(running) - set(done))} wait for ever")


def _distribute(
    value: Tensor, placements: Sequence[Placement], axes: Sequence[AxisShares], mesh: Mesh
) -> list[Tensor]:
    pieces: list[Tensor] = [value]
    generator = torch.Generator().manual_seed(0)
    for placement, axis in zip(placements, axes, strict=True):
        pieces = [part for piece in pieces for part in distribute(piece, placement, axis, generator)]
    assert len(pieces) == mesh.size
    return pieces


def _whole(
    graph: Graph, locals_: list[LocalGraph], results: list[list[Any]], axes: Sequence[AxisShares]
) -> dict[str, Tensor]:
    first = locals_[0]
    replicated: tuple[Placement, ...] = tuple(Replicate() for _ in axes)
    leaving = {"total": first.total_placement, "weight": first.weight_placement}
    leaving |= {f"gradient:{k}": v for k, v in first.gradient_placements.items()}
    leaving |= {f"buffer:{name}": replicated for name in graph.new_buffers}
    found = {}
    for position, (name, placements) in enumerate(leaving.items()):
        parts = [result[position] for result in results]
        for placement, axis in reversed(list(zip(placements, axes, strict=True))):
            groups = [parts[at : at + axis.size] for at in range(0, len(parts), axis.size)]
            parts = [_joined(group, placement, name) for group in groups]
        found[name] = parts[0]
    return found


def _joined(parts: list[Tensor], placement: Placement, name: str) -> Tensor:
    if isinstance(placement, Partial):
        return sum(parts[1:], start=parts[0])
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-9, atol=1e-9, msg=f"ranks differ in {name}")
    return parts[0]


def run_op(op: OneOp, strategies: Sequence[Strategy], axes: Sequence[AxisShares]) -> list[Tensor]:
    """The outputs of one op, whole, where each axis runs it as one of `strategies` says."""
    chosen = [_placements(op, strategy, axis) for strategy, axis in zip(strategies, axes, strict=True)]
    found = run_graph(op.graph, chosen, op.inputs)
    return [found[f"gradient:out{position}"] for position in op.positions]


def _placements(op: OneOp, strategy: Strategy, axis: AxisShares) -> Placements:
    outputs: dict[fx.Node, tuple[Placement, ...]] = {}
    for node in op.graph.graph.nodes:
        outputs[node] = (Replicate(),)
    leaves = pytree.tree_leaves((op.node.args, op.node.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    outputs |= {node: (placement,) for node, placement in zip(tensors, strategy.inputs, strict=True)}
    outputs[op.node] = strategy.outputs
    for position, node in zip(op.positions, op.outputs, strict=True):
        if node is not op.node:
            outputs[node] = (strategy.outputs[position],)
    return Placements(axis=axis, strategies={op.node: strategy}, outputs=outputs, gathered=())
