"""What is shown of a plan on a graph: where every tensor is, and what is exchanged, as plain values.

Made by `show.list_placements`; printed by `plait graph --placements`. What is alike in repeated blocks is one entry
with a count (`h.*.up.weight`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldParameter:
    """A parameter, or the same one of several blocks."""

    name: str
    count: int
    shape: tuple[int, ...]
    """Of the whole."""
    held: str
    """What the first rank holds between steps: a shape, or a part of it."""
    placements: tuple[str, ...]
    """Per axis; `flat` on `data`: a consecutive part of a flat tensor in which several parameters lie."""
    num_bytes: int
    """Of one whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOp:
    """An op, or the same one of several blocks."""

    key: str
    """As a placement file calls it."""
    count: int
    module: str
    phase: str
    op: str
    strategies: tuple[str, ...]
    """Per axis: inputs -> outputs."""
    is_whole: bool
    """Whether every rank does all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Communication, or a change of placement that needs none."""

    collective: str
    """`none`: every rank takes its piece, or its part of a sum, of what it has."""
    axis: str
    """One, or several joined by `+`."""
    num_bytes: int
    """Of the whole tensor: what a gather ends with, what a reduction begins with; of a halo, its edges; 0 for none."""
    count: int
    what: str
    """The tensor: a parameter, the op that made it, or what travels together."""
    change: str
    """`S(0) -> R`; empty where it belongs to the local form of an op."""
    user: str
    """The op that asked for it; empty for what belongs to the whole step."""
    phase: str
    module: str
    source: str
    """file:line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """A tensor that is made whole for an op, or an op that runs by a rule of torch's because there is none of ours."""

    axis: str
    key: str
    count: int
    op: str
    module: str
    source: str
    tensor: str
    """What is gathered; empty where nothing is."""
    num_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """All communication of one kind in a step."""

    collective: str
    axis: str
    count: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """One step under one plan, as its first rank sees it."""

    plan: str
    axes: tuple[tuple[str, int], ...]
    """Those with more than one rank."""
    num_samples: int
    """Of the first micro-batch, which the entries below describe."""
    num_micro_batches: int
    zero: int
    """What is cut over `data` beside the batch: 1 optimizer state, 2 gradients too, 3 parameters too."""
    parameters: tuple[HeldParameter, ...]
    ops: tuple[PlacedOp, ...]
    transfers: tuple[Transfer, ...]
    """Of the ops in the first micro-batch, and of the step as a whole."""
    fallbacks: tuple[Fallback, ...]
    totals: tuple[Total, ...]
    """Of the whole step, over all micro-batches."""
