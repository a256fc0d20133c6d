"""The ways in which every class of ops can run, offered to each other until nothing new comes up.

In: the flow of a graph and its classes. Out: strategies per class. Rules list shards with outer parts (`S(0/3)`) only
where they are told of them, so every such shard that one op lists is told to the ops before and after it; what then
finds no partner is dropped.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch import fx

from plait.program.place.placement import Placement, R, Shard, Strategy
from plait.program.place.propagate import candidates
from plait.program.place.rules import Op, find_rule, views
from plait.search.place.flow import Flow
from plait.search.place.folding import OpClass

_ROUNDS = 8
"""A shard travels one op a round; most meet after two or three."""


class Options:
    """Strategies per class, by the index of the class."""

    def __init__(
        self,
        flow: Flow,
        classes: Sequence[OpClass],
        fixed: Mapping[fx.Node, Placement],
        pins: Mapping[fx.Node, Strategy],
    ) -> None:
        self.flow = flow
        self.classes = classes
        self.fixed = fixed
        self.pins = pins
        self.index = {node: i for i, entry in enumerate(classes) for node in entry.nodes}
        self.outers: list[set[int]] = [view_outers(entry.first, flow) for entry in classes]
        self.told: list[set[tuple[int, Placement]]] = [set() for _ in classes]
        self.edges = self._edges()
        self.listed: list[list[Strategy]] = [[] for _ in classes]

    def find(self) -> list[list[Strategy]]:
        """All useful strategies of every class."""
        stale = set(range(len(self.classes)))
        for _ in range(_ROUNDS):
            for index in stale:
                self.listed[index] = self._list(index)
            stale = self._tell()
            if not stale:
                break
        self._inputs()
        while self._drop():
            self._inputs()
        return self.listed

    def _edges(self) -> list[tuple[int, int, int, int]]:
        """(producer class, output, consumer class, position), each once."""
        found: dict[tuple[int, int, int, int], None] = {}
        for node, tensors in self.flow.reads.items():
            for position, (producer, output) in enumerate(tensors):
                found[(self.index[producer], output, self.index[node], position)] = None
        return list(found)

    def _list(self, index: int) -> list[Strategy]:
        node = self.classes[index].first
        if node.op != "call_function":
            return []
        if node in self.pins:
            return [self.pins[node]]
        op = Op(node, self.flow.axis, frozenset(self.outers[index] - {1}))
        found = dict.fromkeys(candidates(op, self.flow.taken(node)))
        return [strategy for strategy in found if self._is_meant(index, strategy)]

    def _is_meant(self, index: int, strategy: Strategy) -> bool:
        """Whether the outer parts of a strategy were told, or begin here: rules put each into every dim."""
        placed = [*enumerate(strategy.inputs), *((~i, p) for i, p in enumerate(strategy.outputs))]
        outer = [(place, p) for place, p in placed if _has_outer(p)]
        return (
            len(outer) < len({place for place, p in placed if isinstance(p, Shard)})
            or any(entry in self.told[index] for entry in outer)
            or not outer
        )

    def _tell(self) -> set[int]:
        """Tell neighbours of shards with outer parts; the classes that learned something."""
        stale = set()
        for producer, output, consumer, position in self.edges:
            given = {(position, s.outputs[output]) for s in self.listed[producer]}
            asked = {(~output, s.inputs[position]) for s in self.listed[consumer]}
            for here, there in ((given, consumer), (asked, producer)):
                new = {entry for entry in here if _has_outer(entry[1])} - self.told[there]
                if new:
                    self.told[there] |= new
                    self.outers[there] |= {p.outer for _, p in new if isinstance(p, Shard)}
                    stale.add(there)
        return stale

    def _inputs(self) -> None:
        """What enters the graph: parameters as any op asks for them, everything else whole or as it is fixed."""
        asked: dict[int, set[Placement]] = {}
        for producer, _, consumer, position in self.edges:
            asked.setdefault(producer, set()).update(s.inputs[position] for s in self.listed[consumer])
        for index, entry in enumerate(self.classes):
            if entry.first.op == "call_function":
                continue
            held: list[Placement] = [self.fixed.get(entry.first, R)]
            if entry.first in self.flow.parameters and entry.first not in self.fixed:
                held += sorted((p for p in asked.get(index, ()) if isinstance(p, Shard)), key=str)
            self.listed[index] = [Strategy((), (placement,)) for placement in held]

    def _drop(self) -> bool:
        """Drop strategies with outer parts that no neighbour shares; whether any was."""
        given: dict[tuple[int, int], set[Placement]] = {}
        asked: dict[tuple[int, int], set[Placement]] = {}
        for producer, output, consumer, position in self.edges:
            given.setdefault((consumer, position), set()).update(
                s.outputs[output] for s in self.listed[producer]
            )
            asked.setdefault((producer, output), set()).update(
                s.inputs[position] for s in self.listed[consumer]
            )
        dropped = False
        for index, entry in enumerate(self.classes):
            if entry.first.op != "call_function" or entry.first in self.pins:
                continue
            parameters = [tensor[0] in self.flow.parameters for tensor in self.flow.reads[entry.first]]
            kept = [s for s in self.listed[index] if self._has_partners(index, s, given, asked, parameters)]
            dropped |= len(kept) != len(self.listed[index])
            self.listed[index] = kept
        return dropped

    def _has_partners(
        self,
        index: int,
        strategy: Strategy,
        given: Mapping[tuple[int, int], set[Placement]],
        asked: Mapping[tuple[int, int], set[Placement]],
        parameters: Sequence[bool],
    ) -> bool:
        inputs = [
            parameters[i] or p in given.get((index, i), ())
            for i, p in enumerate(strategy.inputs)
            if _has_outer(p)
        ]
        outputs = [
            p in asked[(index, i)]
            for i, p in enumerate(strategy.outputs)
            if _has_outer(p) and (index, i) in asked
        ]
        return (any(inputs) or not inputs) and (any(outputs) or not outputs)


def _has_outer(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.outer > 1


def view_outers(node: fx.Node, flow: Flow) -> set[int]:
    """The outer parts that a view's argument must have so that some dim of the result is cut."""
    if node.op != "call_function" or find_rule(node.target) is not views.view:
        return set()
    op = Op(node, flow.axis)
    found = set()
    for source, result in views.view_groups(op.shapes[0], op.out):
        for dim in result:
            lead, before = prod(op.out[d] for d in result if d < dim), 1
            for own in source:
                extent = op.shapes[0][own]
                if lead % before == 0 and before < lead < before * extent:
                    found.add(lead // before)
                before *= extent
    return found
