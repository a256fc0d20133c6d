"""The choice of placements as numbers: classes, their options, and what each combination costs.

In: the flow of a graph, what a person fixed. Out: a `Problem`, which `solve` minimizes, and which turns a choice of one
option per class back into placements. It decides nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from plait.program.place.placement import Partial, Placement, Shard, Strategy
from plait.program.place.propagate import Placements
from plait.search.place.cost import BYTES_PER_FLOP, exchanged_bytes, share_kept
from plait.search.place.flow import Flow, Tensor, is_cut
from plait.search.place.folding import OpClass, fold
from plait.search.place.options import Options

_ANY = "any"
"""Both phases together."""
GRADIENT = -1
"""The position of an edge that leads from a gradient to its parameter."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor from one class to another."""

    producer: int
    output: int
    consumer: int
    position: int
    """Of the consumer's inputs; `GRADIENT` where the consumer is the parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Tensors of one class that are read by the same classes: each conversion is paid once."""

    edges: tuple[Edge, ...]
    kind: type[Shard] | type[Partial]
    """Of the placements that it counts for: sums are formed once, shards are gathered once a phase."""
    num_bytes: float
    """Of all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One option per class is to be chosen."""

    flow: Flow
    classes: Sequence[OpClass]
    options: Sequence[Sequence[Strategy]]
    """Of each class."""
    sharings: Sequence[Sharing]
    passed_on: frozenset[Edge]
    """Edges into ops that only pass a tensor on, where what can be converted after the op need not be before."""
    whole: Sequence[tuple[int, int, float]]
    """(class, output, bytes) of what must leave whole."""
    work: Sequence[Sequence[float]]
    """Cost of computing each option of each class, in bytes."""
    exchanged: Sequence[Sequence[float]]
    """Bytes that each option of each class sends by itself."""
    memory: Sequence[Sequence[float]]
    """Bytes that each option of each class holds."""

    def wanted(self, edge: Edge, option: int) -> Placement:
        """How the consumer's option wants the edge's tensor."""
        strategy = self.options[edge.consumer][option]
        return strategy.outputs[0] if edge.position == GRADIENT else strategy.inputs[edge.position]

    def placements(self, chosen: Sequence[int]) -> Placements:
        """The placements that a choice means."""
        strategies: dict[fx.Node, Strategy] = {}
        outputs: dict[fx.Node, tuple[Placement, ...]] = {}
        for entry, options, choice in zip(self.classes, self.options, chosen, strict=True):
            for node in entry.nodes:
                outputs[node] = options[choice].outputs
                if node.op == "call_function":
                    strategies[node] = options[choice]
        for node in self.flow.graph.ops():
            if node not in outputs:
                outputs[node] = (outputs[node.args[0]][node.args[1]],)  # type: ignore[index]
        return Placements(axis=self.flow.axis, strategies=strategies, outputs=outputs, gathered=())


def pose(
    flow: Flow,
    fixed: Mapping[fx.Node, Placement],
    pins: Mapping[fx.Node, Strategy],
    *,
    blocks: bool = True,
) -> Problem:
    """The problem of a graph; `fixed` are inputs whose placement is given, `pins` ops whose strategy is."""
    classes = fold(flow, {**fixed, **pins}, blocks=blocks)
    options = Options(flow, classes, fixed, pins)
    listed = options.find()
    sharings, whole = _sharings(flow, options.index)
    return Problem(
        flow=flow,
        classes=classes,
        options=listed,
        sharings=sharings,
        passed_on=_passed_on(flow, classes, sharings),
        whole=whole,
        work=[_work(flow, entry, found) for entry, found in zip(classes, listed, strict=True)],
        exchanged=[_exchanged(flow, entry, found) for entry, found in zip(classes, listed, strict=True)],
        memory=[_memory(flow, entry, found) for entry, found in zip(classes, listed, strict=True)],
    )


def _sharings(flow: Flow, index: Mapping[fx.Node, int]) -> tuple[list[Sharing], list[tuple[int, int, float]]]:
    read: dict[tuple[Tensor, str], set[Edge]] = {}

    def note(tensor: Tensor, phase: str, consumer: int, position: int) -> None:
        edge = Edge(index[tensor[0]], tensor[1], consumer, position)
        read.setdefault((tensor, phase), set()).add(edge)
        read.setdefault((tensor, _ANY), set()).add(edge)

    for node, tensors in flow.reads.items():
        for position, tensor in enumerate(tensors):
            note(tensor, node.meta["phase"], index[node], position)
    names = {name: node for node, name in flow.parameters.items()}
    whole = []
    for end in flow.ends:
        producer, output = end.tensor
        if end.name:
            note(end.tensor, end.phase, index[names[end.name]], GRADIENT)
        else:
            whole.append((index[producer], output, flow.num_bytes(end.tensor)))
    found: dict[tuple[bool, tuple[Edge, ...]], float] = {}
    for (tensor, phase), edges in read.items():
        ordered = sorted(edges, key=lambda e: (e.producer, e.output, e.consumer, e.position))
        key = (phase == _ANY, tuple(ordered))
        found[key] = found.get(key, 0.0) + flow.num_bytes(tensor)
    sharings = [
        Sharing(edges=edges, kind=Partial if any_phase else Shard, num_bytes=total)
        for (any_phase, edges), total in found.items()
    ]
    return sharings, whole


def _passed_on(flow: Flow, classes: Sequence[OpClass], sharings: Sequence[Sharing]) -> frozenset[Edge]:
    """Edges to ops of one tensor in and one as large out, that alone read it, and whose readers are of their own phase.

    A conversion costs the same on both sides of such an op, so only those on its far side are looked at, and making
    the tensor whole, which an op may need that cannot take the shard or the sum.
    """
    passing = {
        number
        for number, entry in enumerate(classes)
        if entry.first.op == "call_function" and all(_passes_on(flow, node) for node in entry.nodes)
    }
    together = [sharing for sharing in sharings if sharing.kind is Partial]
    often = Counter((edge.producer, edge.output) for sharing in together for edge in sharing.edges)
    found = {edge for sharing in together for edge in sharing.edges if edge.consumer in passing}
    return frozenset(edge for edge in found if often[(edge.producer, edge.output)] == 1)


def _passes_on(flow: Flow, node: fx.Node) -> bool:
    if len(flow.reads[node]) != 1 or isinstance(node.meta["val"], (tuple, list)):
        return False
    same_size = flow.num_bytes(flow.reads[node][0]) == flow.num_bytes((node, 0))
    readers = flow.readers.get((node, 0), ())
    return same_size and all(reader.meta["phase"] == node.meta["phase"] for reader, _ in readers)


def _work(flow: Flow, entry: OpClass, options: Sequence[Strategy]) -> list[float]:
    flops = sum(flow.flops(node) for node in entry.nodes if node.op == "call_function")
    return [BYTES_PER_FLOP * flops / (flow.axis.size if is_cut(option) else 1) for option in options]


def _exchanged(flow: Flow, entry: OpClass, options: Sequence[Strategy]) -> list[float]:
    if entry.first.op != "call_function":
        return [0.0] * len(options)
    return [len(entry.nodes) * exchanged_bytes(flow, entry.first, option) for option in options]


def _memory(flow: Flow, entry: OpClass, options: Sequence[Strategy]) -> list[float]:
    found = []
    for option in options:
        total = 0.0
        for node in entry.nodes:
            if node in flow.parameters:
                total += flow.held_bytes(node) * share_kept(option.outputs[0], flow.axis.size)
            total += sum(
                flow.num_bytes((node, output)) * share_kept(placement, flow.axis.size)
                for output, placement in enumerate(option.outputs)
                if (node, output) in flow.kept
            )
        found.append(total)
    return found
