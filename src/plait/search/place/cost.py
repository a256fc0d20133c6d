"""What placements cost: bytes that a rank sends, work that it repeats, memory that it needs.

In: the flow of a graph and the placements on one axis. Out: a `Cost`. One function for all: the pattern, a file and the
solver's choice are compared by it. The bytes are those of `conversion_bytes`, per rank and micro-step.

A conversion is paid once per tensor and target, however many ops share it, as `localize` writes it; what is gathered
from shards is not kept, and is gathered again in the backward.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from plait.program.place.conversion_cost import conversion_bytes
from plait.program.place.placement import Partial, Placement, R, Replicate, Shard, Strategy
from plait.program.place.propagate import Placements
from plait.program.place.rules.base import aten, ours
from plait.search.place.flow import Flow, Tensor, is_cut, value_of

BYTES_PER_FLOP = 1 / 3000
"""What a repeated FLOP counts, in bytes: a device of 300 TFLOP/s on links of 100 GB/s sends a byte in 3000 FLOPs."""
_ROWS_BACKWARD = (aten._softmax_backward_data, aten._log_softmax_backward_data)
_ROWS = (aten._softmax, aten._log_softmax, *_ROWS_BACKWARD)
_WINDOWS = (
    aten.convolution, aten.convolution_backward, aten.max_pool2d_with_indices,
    aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One micro-step on one rank."""

    num_bytes: float
    """Sent along the axis."""
    flops: float
    """Computed."""
    memory_bytes: float
    """Parameters with gradients and optimizer state, and activations kept for the backward."""
    collectives: Mapping[str, int]
    """How many of each kind."""

    @property
    def total(self) -> float:
        """What is minimized, in bytes."""
        return self.num_bytes + BYTES_PER_FLOP * self.flops


def collective_of(have: Placement, want: Placement) -> str | None:
    """The communication that a conversion is."""
    if have == want or isinstance(have, Replicate):
        return None
    if isinstance(have, Partial):
        return "all_reduce" if isinstance(want, Replicate) else "reduce_scatter"
    return "all_gather"


def share_kept(placement: Placement, num_ranks: int) -> float:
    """The shard of a tensor that a rank holds."""
    return 1 / num_ranks if isinstance(placement, Shard) else 1.0


def exchanged_bytes(flow: Flow, node: fx.Node, strategy: Strategy) -> float:
    """Bytes that an op's own local form sends: sums of rows, statistics of a batch, keys and values of attention."""
    if not is_cut(strategy) or flow.axis.size == 1:
        return 0.0
    part = (flow.axis.size - 1) / flow.axis.size
    packet = getattr(node.target, "overloadpacket", None)
    inputs = list(zip(flow.reads[node], strategy.inputs, strict=True))
    if packet in _ROWS:
        shard, value = strategy.outputs[0], value_of((node, 0))
        dim = node.args[2 if packet in _ROWS_BACKWARD else 1]
        if isinstance(shard, Shard) and value is not None and shard.dim == dim % value.ndim:  # type: ignore[operator]
            rows = flow.num_bytes((node, 0)) / value.shape[shard.dim]
            return 2 * part * rows * (1 if packet in _ROWS_BACKWARD else 2)
        return 0.0
    if packet in (ours.attention, ours.attention_backward):
        if isinstance(strategy.outputs[0], Shard) and strategy.outputs[0].dim > 1:
            times = 1 if packet is ours.attention else 2
            return times * part * sum(flow.num_bytes(tensor) for tensor, _ in inputs[-2:])
        return 0.0
    if packet in _WINDOWS and any(isinstance(p, Shard) and p.dim > 1 for p in strategy.outputs):
        return _halo_bytes(flow, node, strategy)
    met = (
        [i for i, p in enumerate(strategy.outputs) if p == R] if any(_is_shard(p) for _, p in inputs) else []
    )
    return 2 * part * sum(flow.num_bytes((node, output)) for output in met)


def _halo_bytes(flow: Flow, node: fx.Node, strategy: Strategy) -> float:
    """Rows that a window reaches beyond a rank's own, at most a window's extent less one, of each tensor cut there."""
    total = 0.0
    weight = value_of(flow.reads[node][1]) if len(flow.reads[node]) > 1 else None
    for tensor, placement in zip(flow.reads[node], strategy.inputs, strict=True):
        value = value_of(tensor)
        if isinstance(placement, Shard) and placement.dim > 1 and value is not None:
            window = weight.shape[placement.dim] if weight is not None and weight.ndim == value.ndim else 3
            total += flow.num_bytes(tensor) / value.shape[placement.dim] * max(window - 1, 0)
    return total


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard)


def flow_cost(flow: Flow, placements: Placements) -> Cost:
    """The cost of placements of a graph whose flow is known."""
    num_ranks = flow.axis.size
    names = {name: node for node, name in flow.parameters.items()}
    paid: dict[tuple[Tensor, Placement, str], float] = {}
    collectives: Counter[str] = Counter()

    def pay(tensor: Tensor, want: Placement, phase: str) -> None:
        have = placements.outputs[tensor[0]][tensor[1]]
        key = (tensor, want, phase if isinstance(have, Shard) else "")
        if have == want or key in paid:
            return
        paid[key] = conversion_bytes(have, want, num_ranks) * flow.num_bytes(tensor)
        kind = collective_of(have, want)
        if kind is not None:
            collectives[kind] += 1

    for node, tensors in flow.reads.items():
        for tensor, want in zip(tensors, placements.strategies[node].inputs, strict=True):
            pay(tensor, want, node.meta["phase"])
    for end in flow.ends:
        pay(end.tensor, placements.of(names[end.name]) if end.name else R, end.phase)
    return Cost(
        num_bytes=sum(paid.values())
        + sum(exchanged_bytes(flow, node, placements.strategies[node]) for node in flow.ops),
        flops=sum(_own_flops(flow, node, placements) for node in flow.ops),
        memory_bytes=_memory(flow, placements),
        collectives=dict(collectives),
    )


def _own_flops(flow: Flow, node: fx.Node, placements: Placements) -> float:
    return flow.flops(node) / (flow.axis.size if is_cut(placements.strategies[node]) else 1)


def _memory(flow: Flow, placements: Placements) -> float:
    held = sum(
        flow.held_bytes(node) * share_kept(placements.of(node), flow.axis.size) for node in flow.parameters
    )
    kept = sum(
        flow.num_bytes(tensor) * share_kept(placements.outputs[tensor[0]][tensor[1]], flow.axis.size)
        for tensor in flow.kept
    )
    return held + kept
