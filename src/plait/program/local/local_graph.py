"""What localizing gives: the graph that one rank runs, and which of its nodes change a placement."""

from dataclasses import dataclass, field

from torch import fx

from plait.program.place.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """A tensor under other placements than those it was made with; in the `meta` of the local nodes that do it."""

    tensor: fx.Node
    """The global node."""
    user: fx.Node | None
    """The global op that asked for it first."""
    have: tuple[Placement, ...]
    """Per axis."""
    want: tuple[Placement, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalGraph:
    """What one rank computes in one micro-step."""

    graph: fx.Graph
    """Ops on local shards, with communication as nodes."""
    total: str
    """Local node of the loss's numerator."""
    weight: str
    """Local node of its denominator."""
    gradients: dict[str, str]
    """Parameter name -> local node."""
    new_buffers: dict[str, str]
    """Buffer name -> local node, equal on all ranks."""
    total_placement: tuple[Placement, ...]
    """Per axis: replicated, or a partial sum."""
    weight_placement: tuple[Placement, ...]
    """Likewise."""
    gradient_placements: dict[str, tuple[Placement, ...]]
    """Likewise, by parameter name."""
    parts: dict[str, dict[int, str]] = field(default_factory=dict)
    """Of a pipeline: parameter name -> stage -> local node of that stage's part of the gradient."""
    offsets: dict[str, str] = field(default_factory=dict)
    """Placeholder -> mesh axis: where the rank is on it, which comes with the step."""
