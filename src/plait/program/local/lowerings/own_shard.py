"""Where a rank's shard of a dim lies: what lowerings ask of a site, and index arithmetic that runs with the step.

In: a site, the placements of one of its tensors, a dim. Out: an `OwnShard`, whose arguments a local function takes to
find its own elements: the first one is known when the step runs, so that all ranks share one local graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from plait.program.local.lowering import Site
from plait.program.place.placement import Placement, Shard
from plait.torch_private.ops import assert_async

ShardArguments = tuple[int, int, int, int, fx.Node]
"""(outer parts, extent of a part, own extent in each part, extent of one unit, offset in units)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnShard:
    """A rank's shard of a dim that one axis cuts."""

    axis: int
    """Index of the axis."""
    arguments: ShardArguments
    """What a local function is given."""


def of_input(site: Site, position: int) -> tuple[Placement, ...]:
    """Placements of a tensor argument, one per axis."""
    return tuple(strategy.inputs[position] for strategy in site.strategies)


def of_output(site: Site, position: int = 0) -> tuple[Placement, ...]:
    """Placements of an output, one per axis."""
    return tuple(strategy.outputs[position] for strategy in site.strategies)


def cutting(site: Site, placements: Sequence[Placement], dim: int) -> list[int]:
    """The axes of several ranks that cut a dim."""
    pairs = enumerate(zip(site.axes, placements, strict=True))
    return [i for i, (axis, p) in pairs if axis.size > 1 and isinstance(p, Shard) and p.dim == dim]


def own_shard(site: Site, placements: Sequence[Placement], dim: int, extent: int) -> OwnShard | None:
    """This rank's shard of a dim of this global extent; None where it is whole."""
    found = cutting(site, placements, dim)
    if not found:
        return None
    assert len(found) == 1, f"{site.node} meets on a dim that several axes cut"
    index = found[0]
    axis, placement = site.axes[index], placements[index]
    assert isinstance(placement, Shard)
    part = extent // placement.outer
    own, per_unit = axis.local(part, site.coordinates[index]), part // max(axis.total, 1)
    return OwnShard(axis=index, arguments=(placement.outer, part, own, per_unit, site.offset(index)))


def is_empty_beside(site: Site, meeting: Sequence[int]) -> bool:
    """Whether this rank has no units of an axis that cuts the op, other than those on which the op's ranks meet."""
    return any(
        axis.size > 1 and axis.units[coordinate] == 0 and any(isinstance(p, Shard) for p in strategy.inputs)
        for index, (axis, coordinate, strategy) in enumerate(
            zip(site.axes, site.coordinates, site.strategies, strict=True)
        )
        if index not in meeting
    )


def in_range(index: Tensor, extent: int, least: int = 0, ignored: int | None = None) -> Tensor:
    """Global indices, all of which are from `least` to `extent`; raises where one is not, as torch does.

    No rank has what it names, so that all ranks together would make nothing of it, without a word.
    """
    valid = (index >= least) & (index < extent)
    if ignored is not None:
        valid |= index == ignored
    assert_async(valid.all(), f"index out of range: one is not from {least} to {extent - 1}")
    return index


def own_index(
    index: Tensor, outer: int, part: int, own: int, per_unit: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Global indices as indices of a rank's shard (0 where it does not have them), and whether it has them."""
    first = offset * per_unit
    if outer == 1:
        shifted = index - first
        inside = (shifted >= 0) & (shifted < own)
    else:
        within = index % part - first
        inside = (within >= 0) & (within < own)
        shifted = index.div(part, rounding_mode="floor") * own + within
    return shifted.masked_fill(~inside, 0), inside


def own_position(index: int, outer: int, part: int, own: int, per_unit: int, offset: int) -> int | None:
    """The same for one index; None where the rank does not have it."""
    within = index % part - offset * per_unit
    return index // part * own + within if 0 <= within < own else None
