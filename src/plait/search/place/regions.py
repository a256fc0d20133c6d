"""Where a shard can live between two weights: from the layer that makes it to the layers that sum over it.

In: the flow of a graph and a layer. Out: a `Region`: the ops that run on shards, and the parameters that are cut for
it, or the op that does not let the shard pass. The rules themselves say how a shard passes an op, so nothing here
knows of attention, heads, fused projections or gated layers: a projection's outputs lead through views, splits and
attention to the projections beside it, and to the one that sums over heads.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from plait.program.place.placement import Placement, R, Shard, Strategy
from plait.program.place.propagate import candidates
from plait.program.place.rules import Op
from plait.program.place.rules.base import aten, ours
from plait.search.place.cost import exchanged_bytes
from plait.search.place.flow import Flow, Tensor, value_of
from plait.search.place.options import view_outers

_LAYERS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, ours.grouped_product)
_LOSSES = (aten.nll_loss_forward, aten.nll_loss2d_forward)
_SMALL = 8
"""What a region may leave to be summed beside the outputs of its layers, as a part of its first tensor: row sums do."""
_AHEAD = 8
"""Ops after a layer in which its output is looked at for fused parts."""


@dataclass
class Region:
    """Ops that run on one shard each, under construction."""

    seed: fx.Node
    tensors: dict[Tensor, Placement] = field(default_factory=dict)
    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    parameters: dict[fx.Node, Placement] = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)
    """What leaves the region as a sum over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """Why a shard cannot be used."""

    layer: fx.Node
    op: fx.Node
    """The op that it does not pass."""
    placement: Placement
    """Of the tensor that comes in; of the layer's own output where that cannot be cut."""
    shape: tuple[int, ...]
    """Of that tensor."""
    num_passed: int
    """Ops that it passed before."""


class _StuckError(Exception):
    """A shard that does not pass an op."""

    def __init__(self, op: fx.Node, placement: Placement) -> None:
        super().__init__(op.name)
        self.op = op
        self.placement = placement


class Regions:
    """Finds regions in one graph."""

    def __init__(self, flow: Flow, fixed: Mapping[fx.Node, Placement]) -> None:
        self.flow = flow
        self.fixed = fixed

    @cached_property
    def trained(self) -> set[fx.Node]:
        """Forward nodes whose floating-point value depends on a parameter."""
        found = set(self.flow.parameters)
        for node in self.flow.ops:
            if node.meta["phase"] == "forward" and any(t[0] in found for t in self.flow.reads[node]):
                value = value_of((node, 0))
                if value is not None and value.is_floating_point():
                    found.add(node)
        return found

    @cached_property
    def layers(self) -> dict[fx.Node, fx.Node]:
        """Product -> weight of every layer in the forward."""
        found = {}
        for node in self.flow.ops:
            if node.meta["phase"] == "forward" and getattr(node.target, "overloadpacket", None) in _LAYERS:
                weights = [p for p in map(self._parameter_of, self.flow.reads[node]) if p is not None]
                weights = [p for p in weights if p.meta["val"].ndim > 1]
                if weights:
                    found[node] = weights[0]
        return found

    def _parameter_of(self, tensor: Tensor) -> fx.Node | None:
        """The parameter of which a tensor is a view or a cast; of several side by side, the first."""
        node = tensor[0]
        while node.op == "call_function" and (
            len(self.flow.reads[node]) == 1 or node.target is ours.beside.default
        ):
            node = self.flow.reads[node][0][0]
        return node if node in self.flow.parameters else None

    def of_layer(self, layer: fx.Node, most_ops: int) -> Region | Blocked | None:
        """The region in which a layer's output is cut by its weight's columns; None where it has more ops than that."""
        blocked: Blocked | None = None
        for outer in (1, *sorted(self._fused_parts(layer))):
            for start in self._starts(layer, outer):
                grown = self._grow(layer, start, most_ops)
                if not isinstance(grown, Blocked):
                    return grown
                if blocked is None or grown.num_passed > blocked.num_passed:
                    blocked = grown
        if blocked is not None:
            return blocked
        value = layer.meta["val"]
        dim = 1 if getattr(layer.target, "overloadpacket", None) is aten.convolution else value.ndim - 1
        return Blocked(
            layer=layer, op=layer, placement=Shard(dim), shape=tuple(map(int, value.shape)), num_passed=0
        )

    def _starts(self, layer: fx.Node, outer: int) -> list[Strategy]:
        """Strategies that take the activations whole and a shard of the weight, and give a shard."""
        activations = [self._parameter_of(tensor) is None for tensor in self.flow.reads[layer]]
        return [
            strategy
            for strategy in self._candidates(layer, [outer])
            if isinstance(strategy.outputs[0], Shard)
            and strategy.outputs[0].outer == outer
            and all(p == R for p, own in zip(strategy.inputs, activations, strict=True) if own)
            and any(isinstance(p, Shard) for p in strategy.inputs)
        ]

    def _fused_parts(self, layer: fx.Node) -> set[int]:
        """Into how many parts the ops after a layer take its output apart."""
        found: set[int] = set()
        front, seen = [layer], {layer}
        for _ in range(_AHEAD):
            front = [user for node in front for user in node.users if user.meta.get("phase") == "forward"]
            front = [user for user in dict.fromkeys(front) if user not in seen][:16]
            seen.update(front)
            for node in front:
                found |= view_outers(node, self.flow)
                if node.op != "call_function" or node not in self.flow.reads:
                    continue
                for strategy in self._candidates(node, []):
                    if len(strategy.inputs) == 1 and isinstance(strategy.inputs[0], Shard):
                        found.add(strategy.inputs[0].outer)
        return found - {1}

    def _candidates(self, node: fx.Node, outers: Iterable[int]) -> list[Strategy]:
        """The strategies of an op, without those whose local form exchanges more than the rows of a softmax."""
        op = Op(node, self.flow.axis, frozenset(outer for outer in outers if outer > 1))
        listed = candidates(op, self.flow.taken(node))
        if getattr(node.target, "overloadpacket", None) in (aten._softmax, aten._log_softmax, *_LOSSES):
            return listed
        return [strategy for strategy in listed if not exchanged_bytes(self.flow, node, strategy)]

    def _grow(self, layer: fx.Node, start: Strategy, most_ops: int) -> Region | Blocked | None:
        region = Region(seed=layer)
        queue: deque[Tensor] = deque()
        try:
            self._run(region, layer, start, queue)
            while queue:
                if len(region.strategies) > most_ops:
                    return None
                tensor = queue.popleft()
                placement = region.tensors[tensor]
                if not self._make(region, tensor, placement, queue):
                    del region.tensors[tensor]  # it stays whole, and its readers take shards of it
                    continue
                for node, position in self.flow.readers.get(tensor, ()):
                    if node.meta["phase"] == "forward":
                        self._read(region, node, position, queue)
        except _StuckError as stuck:
            return self._blocked(region, stuck.op, stuck.placement)
        return region if self._is_closed(region) else self._blocked(region, layer, start.outputs[0])

    def _run(self, region: Region, node: fx.Node, strategy: Strategy, queue: deque[Tensor]) -> None:
        """Let an op run like this."""
        region.strategies[node] = strategy
        for tensor, placement in zip(self.flow.reads[node], strategy.inputs, strict=True):
            if isinstance(placement, Shard):
                self._place(region, node, tensor, placement, queue)
        for output, placement in enumerate(strategy.outputs):
            if isinstance(placement, Shard):
                self._place(region, node, (node, output), placement, queue)
            elif (node, output) in region.tensors:
                raise _StuckError(node, region.tensors[(node, output)])
            elif placement != R:
                region.sums.append((node, output))

    def _place(
        self, region: Region, reader: fx.Node, tensor: Tensor, placement: Shard, queue: deque[Tensor]
    ) -> None:
        node = tensor[0]
        if region.tensors.get(tensor, placement) != placement or tensor in region.sums:
            raise _StuckError(reader, placement)
        if node in self.flow.parameters:
            known = region.parameters.get(node, self.fixed.get(node, placement))
            if known != placement:
                raise _StuckError(reader, placement)
            region.parameters[node] = placement
        elif node in self.trained and tensor not in region.tensors:
            region.tensors[tensor] = placement
            queue.append(tensor)

    def _make(self, region: Region, tensor: Tensor, placement: Placement, queue: deque[Tensor]) -> bool:
        """Choose how a tensor's producer gives it; False where it cannot."""
        node, output = tensor
        known = region.strategies.get(node)
        if known is not None:
            return known.outputs[output] == placement
        outers = _outers([placement, *self._known(region, node)]) | view_outers(node, self.flow)
        for strategy in self._candidates(node, outers):
            if strategy.outputs[output] == placement and self._fits(region, node, strategy):
                self._run(region, node, strategy, queue)
                return True
        return False

    def _read(self, region: Region, node: fx.Node, position: int, queue: deque[Tensor]) -> None:
        """Choose how an op reads a shard."""
        placement = region.tensors[self.flow.reads[node][position]]
        known = region.strategies.get(node)
        if known is not None:
            if known.inputs[position] != placement:
                raise _StuckError(node, placement)
            return
        for strategy in self._candidates(node, _outers(self._known(region, node))):
            if strategy.inputs[position] == placement and self._fits(region, node, strategy):
                self._run(region, node, strategy, queue)
                return
        raise _StuckError(node, placement)

    def _known(self, region: Region, node: fx.Node) -> list[Placement]:
        return [region.tensors[tensor] for tensor in self.flow.reads[node] if tensor in region.tensors]

    def _fits(self, region: Region, node: fx.Node, strategy: Strategy) -> bool:
        return all(
            region.tensors.get(tensor, placement) == placement
            for tensor, placement in zip(self.flow.reads[node], strategy.inputs, strict=True)
        )

    def _is_closed(self, region: Region) -> bool:
        """Whether it cuts weights, and only sums over ranks that layers make, or small final ones, leave it."""
        first = self.flow.num_bytes((region.seed, 0))
        others = [tensor for tensor in region.sums if tensor[0] not in self.layers]
        small = all(self.flow.num_bytes(tensor) * _SMALL <= first for tensor in others)
        back = any(self._comes_back(region, node) for node, _ in others)
        return bool(region.parameters) and bool(region.sums) and small and not back

    def _comes_back(self, region: Region, node: fx.Node) -> bool:
        """Whether a sum is used in the region itself, as the mean square of a norm is."""
        front = {node}
        for _ in range(_AHEAD):
            front = {user for entry in front for user in entry.users if user.meta.get("phase") == "forward"}
            if any(user in region.strategies for user in front):
                return True
        return False

    def _blocked(self, region: Region, op: fx.Node, placement: Placement) -> Blocked:
        tensors = [t for t in self.flow.reads[op] if region.tensors.get(t) == placement]
        value = value_of(tensors[0] if tensors else (region.seed, 0))
        shape = tuple(map(int, value.shape)) if value is not None else ()
        return Blocked(
            layer=region.seed, op=op, placement=placement, shape=shape, num_passed=len(region.strategies)
        )


def _outers(placements: Iterable[Placement]) -> set[int]:
    return {p.outer for p in placements if isinstance(p, Shard)}
