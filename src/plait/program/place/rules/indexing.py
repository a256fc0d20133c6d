"""Indexing with tensors: gather, scatter, advanced indexing, and what differentiates them."""

from torch import fx

from plait.program.place.rules.base import (
    Op,
    P,
    Placement,
    R,
    Shard,
    Strategy,
    aten,
    can_be_sum,
    rule,
    shape_of,
    shards,
)


@rule(aten.index, aten._unsafe_index)
def index(op: Op) -> list[Strategy]:
    """`x[:, i, j]`: dims of x that are not indexed pass through; shards of the indices cut what they pick."""
    layout = _layout(op)
    if layout is None:
        return []
    first, count, index_ndim = layout
    picks = len(op.tensors) - 1
    found = []
    for dim in range(len(op.shapes[0])):
        if dim < first or dim >= first + count:
            result = dim if dim < first else dim - count + index_ndim
            found.append(Strategy((Shard(dim), *(R,) * picks), (Shard(result),)))
    for dim in range(index_ndim):
        if op.out[first + dim] != 1:
            cut = _cut(op.shapes[1:], dim, index_ndim, op.out[first + dim])
            found.append(Strategy((R, *cut), (Shard(first + dim),)))
    found.append(Strategy((P, *(R,) * picks), (P,)))
    if picks == 1 and can_be_sum(op):  # a rank finds what it has; the others add it
        found.append(Strategy((Shard(first), R), (P,)))
    return found


@rule(aten.index_put, aten._unsafe_index_put)
def index_put(op: Op) -> list[Strategy]:
    """Dims that are not indexed pass through; of a dim that is, a rank has some rows. Into zeros, every rank adds."""
    layout = _layout(op)
    if layout is None:
        return []
    first, count, index_ndim = layout
    values, picks = op.shapes[-1], len(op.tensors) - 2
    found = [Strategy((Shard(first), R, R), (Shard(first),))] if picks == 1 else []
    if len(values) != len(op.out) - count + index_ndim:  # broadcast from the right: its dims are others
        return found
    for dim in shards(len(op.out), skip=range(first, first + count)):
        own = dim if dim < first else dim - count + index_ndim
        if values[own] == op.out[dim]:
            found.append(Strategy((Shard(dim), *(R,) * picks, Shard(own)), (Shard(dim),)))
    if not op.arg("accumulate") or not _is_zeros(op.tensors[0]):
        return found
    for dim in range(index_ndim):
        extent = values[first + dim]
        cut = _cut(op.shapes[1:-1], dim, index_ndim, extent)
        if extent != 1:
            found.append(Strategy((R, *cut, Shard(first + dim)), (P,)))
    return [*found, Strategy((R, *(R,) * (len(op.tensors) - 2), P), (P,))]


def _layout(op: Op) -> tuple[int, int, int] | None:
    """(first indexed dim, number of indexed dims, dims of the broadcast index); None where they are not in a row."""
    indices = op.arg("indices")
    places = [i for i, entry in enumerate(indices) if entry is not None]
    if places != list(range(places[0], places[0] + len(places))):
        return None
    tensors = [entry for entry in indices if isinstance(entry, fx.Node)]
    if any(
        not entry.meta["val"].dtype.is_signed for entry in tensors
    ):  # a boolean mask picks as many as it finds
        return None
    return places[0], len(places), max(len(shape_of(entry)) for entry in tensors)


def _cut(shapes: list[tuple[int, ...]], dim: int, ndim: int, extent: int) -> tuple[Placement, ...]:
    placements: list[Placement] = []
    for shape in shapes:
        own = dim - (ndim - len(shape))
        placements.append(Shard(own) if own >= 0 and shape[own] == extent and extent != 1 else R)
    return tuple(placements)


def _is_zeros(node: fx.Node) -> bool:
    if node.target in (aten.full.default, aten.new_full.default, aten.full_like.default):
        return bool(node.args[-1] == 0)
    return node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


@rule(aten.gather)
def gather(op: Op) -> list[Strategy]:
    """Along the dim that is indexed, a rank finds what it has, or looks for its own indices in everything."""
    chosen = op.dim()
    dims = shards(len(op.out), skip=[chosen])
    found = [op.same(Shard(dim)) for dim in dims if op.shapes[0][dim] == op.shapes[1][dim]]
    found.append(Strategy((R, Shard(chosen)), (Shard(chosen),)))
    if can_be_sum(op):
        found += [Strategy((Shard(chosen), R), (P,)), Strategy((P, R), (P,))]
    return found


@rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def scatter(op: Op) -> list[Strategy]:
    chosen, count = op.dim(), len(op.tensors)
    dims = shards(len(op.out), skip=[chosen])
    found = [op.same(Shard(dim)) for dim in dims if len({shape[dim] for shape in op.shapes if shape}) == 1]
    found.append(Strategy((Shard(chosen), *(R,) * (count - 1)), (Shard(chosen),)))
    if op.node.target is aten.scatter_add.default:
        found.append(Strategy((P, R, P), (P,)))
        if op.shapes[1][chosen] == op.shapes[2][chosen]:
            found.append(Strategy((P, Shard(chosen), Shard(chosen)), (P,)))
    return found


@rule(aten.index_select)
def index_select(op: Op) -> list[Strategy]:
    chosen = op.dim()
    found = [Strategy((Shard(dim), R), (Shard(dim),)) for dim in shards(len(op.out), skip=[chosen])]
    found.append(Strategy((R, Shard(0)), (Shard(chosen),)))
    if can_be_sum(op):
        found += [Strategy((Shard(chosen), R), (P,)), Strategy((P, R), (P,))]
    return found


@rule(aten.index_add)
def index_add(op: Op) -> list[Strategy]:
    chosen = op.dim()
    dims = shards(len(op.out), skip=[chosen])
    return [
        *(Strategy((Shard(dim), R, Shard(dim)), (Shard(dim),)) for dim in dims),
        Strategy((Shard(chosen), R, R), (Shard(chosen),)),
        Strategy((P, Shard(0), Shard(chosen)), (P,)),
        Strategy((P, R, P), (P,)),
    ]
