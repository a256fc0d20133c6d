"""The ops that a pattern says nothing about: run on what comes in, with sums over ranks formed at once.

In: placements of parameters, strategies of the ops that a pattern names. Out: placements of everything. `propagate`
takes the cheapest conversion at each op; this one also forms a sum over ranks before it is added to what is whole or
read by several ops, starts no new shards, and looks ahead to how gradients must leave.

`sequence`: what is whole between the layers is cut by positions instead, so that a sum is formed by a reduce-scatter,
and a whole tensor by an all-gather in front of the next layer.
"""

from collections.abc import Mapping

from torch import fx

from plait.program.place.conversion_cost import PER_SHARD, conversion_bytes
from plait.program.place.placement import Partial, Placement, R, Replicate, Shard, Strategy
from plait.program.place.propagate import Placements, candidates
from plait.program.place.rules import Op, find_rule, views
from plait.program.place.rules.base import aten
from plait.search.place.flow import Flow, Tensor, value_of

_POSITIONS = Shard(1)
"""Samples are dim 0, positions dim 1 of what runs between the layers."""


def complete(
    flow: Flow,
    inputs: Mapping[fx.Node, Placement],
    named: Mapping[fx.Node, Strategy],
    *,
    sequence: bool = False,
) -> Placements:
    """Strategies for all ops, given placements of inputs and the strategies of some ops."""
    return _Completion(flow, inputs, named, sequence).run()


class _Completion:
    def __init__(
        self,
        flow: Flow,
        inputs: Mapping[fx.Node, Placement],
        named: Mapping[fx.Node, Strategy],
        sequence: bool,
    ) -> None:
        self.flow = flow
        self.inputs = inputs
        self.named = named
        self.sequence = sequence
        self.strategies: dict[fx.Node, Strategy] = {}
        self.outputs: dict[fx.Node, tuple[Placement, ...]] = {}
        self.leaving = self._leaving()

    def run(self) -> Placements:
        for node in self.flow.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.outputs[node] = (self.inputs.get(node, R),)
            elif node in self.flow.reads:
                self.strategies[node] = self.named.get(node) or self._choose(node)
                self.outputs[node] = self.strategies[node].outputs
            elif node.op == "call_function":
                self.outputs[node] = (self.outputs[node.args[0]][node.args[1]],)
        self._make_shards()
        return Placements(axis=self.flow.axis, strategies=self.strategies, outputs=self.outputs, gathered=())

    def _choose(self, node: fx.Node) -> Strategy:
        have = [self._of(tensor) for tensor in self.flow.reads[node]]
        whole = Op(node, self.flow.axis).same(R)
        if all(placement == R for placement in have) or self._is_gathered(node, have):
            return whole
        outers = {p.outer for p in have if isinstance(p, Shard)} - {1}
        op = Op(node, self.flow.axis, frozenset(outers))
        allowed = [s for s in candidates(op, self.flow.taken(node)) if self._is_allowed(node, have, s)]
        return min(allowed, key=lambda strategy: self._cost(node, have, strategy))

    def _of(self, tensor: Tensor) -> Placement:
        return self.outputs[tensor[0]][tensor[1]]

    def _is_allowed(self, node: fx.Node, have: list[Placement], strategy: Strategy) -> bool:
        pairs = list(zip(have, strategy.inputs, strict=True))
        tensors = self.flow.reads[node]
        sums = [i for i, want in enumerate(strategy.inputs) if isinstance(want, Partial)]
        joins = [i for i in sums if not isinstance(have[i], Partial)]
        if (
            joins
            and not self._is_added_to(node)
            and any(tensors[i][0] not in self.flow.parameters for i in joins)
        ):
            return False
        if any(isinstance(have[i], Partial) and len(self.flow.readers[tensors[i]]) > 1 for i in sums):
            return False  # several would form the sum, each after its own op
        cut = [(old, want) for old, want in pairs if isinstance(want, Shard)]
        starts = bool(cut) and not any(old == want for old, want in cut)
        return not starts or (self.sequence and self._is_stream(node) and strategy.outputs[0] == _POSITIONS)

    def _is_added_to(self, node: fx.Node) -> bool:
        """Whether more is added to what an op gives before anything else is done with it."""
        readers = self.flow.readers.get((node, 0), ())
        return len(readers) == 1 and readers[0][0].target is aten.add.Tensor

    def _is_stream(self, node: fx.Node) -> bool:
        value = value_of((node, 0))
        return value is not None and value.ndim == 3 and value.is_floating_point()

    def _is_gathered(self, node: fx.Node, have: list[Placement]) -> bool:
        """Whether a tensor cut by positions is made whole here: before it is flattened for a layer, and only once."""
        if not self.sequence or find_rule(node.target) is not views.view or have != [_POSITIONS]:
            return False
        source, value = value_of(self.flow.reads[node][0]), value_of((node, 0))
        return source is not None and value is not None and (source.ndim, value.ndim) == (3, 2)

    def _cost(self, node: fx.Node, have: list[Placement], strategy: Strategy) -> float:
        ranks = self.flow.axis.size
        total = 0.0
        for tensor, old, want in zip(self.flow.reads[node], have, strategy.inputs, strict=True):
            if old != want:
                part = conversion_bytes(old, want, ranks) or PER_SHARD
                total += part * max(self.flow.num_bytes(tensor), 1.0)
        for output, placement in enumerate(strategy.outputs):
            wanted = self.leaving.get((node, output))
            if wanted is not None and placement != wanted:
                total += conversion_bytes(placement, wanted, ranks) * self.flow.num_bytes((node, output))
        return total

    def _leaving(self) -> dict[Tensor, Placement]:
        """How gradients must leave, seen from the ops that only reshape or add them."""
        names = {name: node for node, name in self.flow.parameters.items()}
        found: dict[Tensor, Placement] = {
            end.tensor: self.inputs.get(names[end.name], R) if end.name else R for end in self.flow.ends
        }
        for node in reversed(self.flow.ops):
            wanted = found.get((node, 0))
            if wanted is None or node.meta["phase"] != "backward":
                continue
            outers = frozenset({wanted.outer} - {1}) if isinstance(wanted, Shard) else frozenset()
            listed = candidates(Op(node, self.flow.axis, outers), self.flow.taken(node))
            passing = [
                s for s in listed if s.outputs == (wanted,) and set(map(type, s.inputs)) == {type(wanted)}
            ]
            if len(passing) == 1 and len(self.flow.reads[node]) <= 2:
                for tensor, placement in zip(self.flow.reads[node], passing[0].inputs, strict=True):
                    if len(self.flow.readers[tensor]) == 1:
                        found.setdefault(tensor, placement)
        return found

    def _make_shards(self) -> None:
        """Let what is whole but only read in shards be made in shards: masks, random numbers, constants."""
        for node in reversed(self.flow.ops):
            strategy = self.strategies[node]
            if node in self.named or any(p != R for p in (*strategy.inputs, *strategy.outputs)):
                continue
            wants = {
                self.strategies[reader].inputs[position]
                for output in range(len(strategy.outputs))
                for reader, position in self.flow.readers.get((node, output), ())
            }
            want = next(iter(wants)) if len(wants) == 1 else R
            if isinstance(want, Replicate | Partial) or len(strategy.outputs) != 1:
                continue
            op = Op(node, self.flow.axis, frozenset({want.outer} - {1}))
            able = [s for s in candidates(op, self.flow.taken(node)) if s.outputs == (want,)]
            able = [s for s in able if not any(isinstance(p, Partial) for p in s.inputs)]
            if able:
                self.strategies[node] = able[0]
                self.outputs[node] = able[0].outputs
