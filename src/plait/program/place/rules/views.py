"""Ops that move elements without computing: views, splits, joins, indexing with constants, factories."""

from collections.abc import Sequence
from math import gcd, prod

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
    ours,
    rule,
    shape_of,
    shards,
)


@rule(aten.view, aten._unsafe_view, aten.reshape, aten._reshape_copy, outers=True)
def view(op: Op) -> list[Strategy]:
    """A shard survives where the cut digit of the index still has a dim of the result to stand in."""
    found = [Strategy((P,), (P,))]
    for source, result in view_groups(op.shapes[0], op.out):
        for dim in source:
            before = prod(op.shapes[0][d] for d in source if d < dim)
            for outer in {1, *op.outers}:
                image = _image(op, result, before * outer)
                if image is not None:
                    found.append(Strategy((Shard(dim, outer),), (image,)))
    return found


def _image(op: Op, result: list[int], lead: int) -> Shard | None:
    """The result's dim in which the units after `lead` leading parts are the next digit."""
    before = 1
    for dim in result:
        extent = op.out[dim]
        if lead % before == 0 and before <= lead < before * extent:
            return Shard(dim, lead // before)
        before *= extent
    return None


def view_groups(source: tuple[int, ...], result: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Match the dims of two shapes with the same number of elements, in the finest groups, without dims of extent 1."""
    groups: list[tuple[list[int], list[int]]] = []
    left = [i for i, extent in enumerate(source) if extent != 1]
    right = [i for i, extent in enumerate(result) if extent != 1]
    if 0 in source:
        return [([i], [i]) for i in left if i in right and source[: i + 1] == result[: i + 1]]
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        size_a, size_b = source[a[0]], result[b[0]]
        while size_a != size_b:
            if size_a < size_b:
                a.append(left.pop(0))
                size_a *= source[a[-1]]
            else:
                b.append(right.pop(0))
                size_b *= result[b[-1]]
        groups.append((a, b))
    return groups


@rule(aten.expand)
def expand(op: Op) -> list[Strategy]:
    shape, out = op.shapes[0], op.out
    found = [Strategy((P,), (P,))]
    for dim in range(len(out)):
        own = dim - (len(out) - len(shape))
        if own >= 0 and shape[own] == out[dim] and out[dim] != 1:
            found.append(Strategy((Shard(own),), (Shard(dim),)))
        elif out[dim] != 1:
            found.append(Strategy((R,), (Shard(dim),)))
    return found


@rule(aten.permute)
def permute(op: Op) -> list[Strategy]:
    order = [int(dim) % len(op.out) for dim in op.arg("dims")]
    return [Strategy((P,), (P,))] + [Strategy((Shard(own),), (Shard(dim),)) for dim, own in enumerate(order)]


@rule(aten.transpose, aten.t)
def transpose(op: Op) -> list[Strategy]:
    order = list(range(len(op.out)))
    a, b = (op.dim("dim0"), op.dim("dim1")) if op.node.target is aten.transpose.int else (0, len(order) - 1)
    order[a], order[b] = order[b], order[a]
    return [Strategy((P,), (P,))] + [Strategy((Shard(own),), (Shard(dim),)) for dim, own in enumerate(order)]


@rule(aten.unsqueeze, aten.squeeze, aten.detach, aten.alias)
def resize_with_ones(op: Op) -> list[Strategy]:
    found = [Strategy((P,), (P,))]
    groups = view_groups(op.shapes[0], op.out)
    return found + [Strategy((Shard(a[0]),), (Shard(b[0]),)) for a, b in groups if len(a) == len(b) == 1]


@rule(aten.slice, aten.flip, aten.constant_pad_nd, aten.roll)
def changes_some_dims(op: Op) -> list[Strategy]:
    """Dims that keep their extent and are not named pass through."""
    touched = _touched(op)
    pads = op.node.target is aten.constant_pad_nd.default and op.arg("value") != 0
    found = [] if pads else [Strategy((P,), (P,))]
    found += [op.same(Shard(dim)) for dim in shards(len(op.out), skip=touched)]
    if op.node.target is aten.slice.Tensor and int(op.arg("step")) == 1:
        dim = op.dim()
        found += [
            Strategy((Shard(dim, outer),), (Shard(dim, count),))
            for outer, count in _slice_parts(op, op.shapes[0][dim], op.out[dim])
        ]
    return found


def _slice_parts(op: Op, extent: int, taken: int) -> list[tuple[int, int]]:
    """(outer, count): in `outer` parts of the dim, the slice is `count` whole ones; all of the dim is any number."""
    start = slice_start(op.arg("start"), extent)
    if not taken:
        return []
    fewest = extent // gcd(start, taken, extent)
    outers = {n for n in (fewest, *op.outers, *(n * extent // taken for n in op.outers)) if n % fewest == 0}
    return [(n, n * taken // extent) for n in sorted(outers) if extent % n == 0]


def slice_start(start: int | None, extent: int) -> int:
    """The first index of a slice."""
    first = int(start or 0)
    return min(max(first + extent if first < 0 else first, 0), extent)


def _touched(op: Op) -> list[int]:
    ndim, target = len(op.out), op.node.target
    if target is aten.slice.Tensor:
        return [op.dim()]
    if target is aten.constant_pad_nd.default:
        pads = op.arg("pad")
        return [ndim - 1 - i // 2 for i, amount in enumerate(pads) if amount != 0]
    dims = op.arg("dims") or range(ndim)
    return [int(dim) % ndim for dim in dims]


@rule(aten.select)
def select(op: Op) -> list[Strategy]:
    """An index of a dim that is cut is on one rank: the others add nothing."""
    chosen, ndim = op.dim(), len(op.shapes[0])
    found = [Strategy((P,), (P,))]
    if can_be_sum(op):
        found.append(Strategy((Shard(chosen),), (P,)))
    return found + [
        Strategy((Shard(dim),), (Shard(dim - (dim > chosen)),)) for dim in shards(ndim, skip=[chosen])
    ]


@rule(
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.unsafe_split,
    aten.unsafe_split_with_sizes,
    aten.unsafe_chunk,
)
def split(op: Op) -> list[Strategy]:
    """Results of a dim with outer parts are some of these each: S(d/3) of a fused projection is three times S(d)."""
    dim = op.dim()
    found = [op.same(P)] + [op.same(Shard(other)) for other in shards(len(op.shapes[0]), skip=[dim])]
    sizes = [shape[dim] for shape in op.outputs]
    for outer, counts in _joined_parts(op, sizes):
        found.append(Strategy((Shard(dim, outer),), tuple(Shard(dim, count) for count in counts)))
    return found


def _joined_parts(op: Op, sizes: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(outer, counts): ways to see a dim as equal parts, of which tensors of these sizes have whole ones each."""
    extent, largest = sum(sizes), gcd(*sizes)
    if not largest:
        return []
    parts = {largest, *(extent // n for n in op.outers), *(size // n for n in op.outers for size in sizes)}
    return [
        (extent // part, tuple(size // part for size in sizes))
        for part in sorted(parts, reverse=True)
        if part and largest % part == 0
    ]


@rule(aten.unbind)
def unbind(op: Op) -> list[Strategy]:
    chosen, count = op.dim(), len(op.outputs)
    return [op.same(P)] + [
        Strategy((Shard(dim),), (Shard(dim - (dim > chosen)),) * count)
        for dim in shards(len(op.shapes[0]), skip=[chosen])
    ]


@rule(aten.cat, ours.beside)
def cat(op: Op) -> list[Strategy]:
    """The inverse of `split`: where all tensors have equal parts, the whole has all of these."""
    if any(len(shape) != len(op.out) for shape in op.shapes):
        return []
    dim = 0 if op.node.target is ours.beside.default else op.dim()
    found = [op.same(P)] + [op.same(Shard(other)) for other in shards(len(op.out), skip=[dim])]
    for outer, counts in _joined_parts(op, [shape[dim] for shape in op.shapes]):
        found.append(Strategy(tuple(Shard(dim, count) for count in counts), (Shard(dim, outer),)))
    return found


@rule(aten.stack)
def stack(op: Op) -> list[Strategy]:
    new = int(op.arg("dim")) % len(op.out)
    return [op.same(P)] + [
        Strategy((Shard(dim - (dim > new)),) * len(op.tensors), (Shard(dim),))
        for dim in shards(len(op.out), skip=[new])
    ]


@rule(aten.repeat)
def repeat(op: Op) -> list[Strategy]:
    """A dim that is repeated has as many outer parts more."""
    extra = len(op.out) - len(op.shapes[0])
    found = [Strategy((P,), (P,))]
    for dim, extent in enumerate(op.shapes[0]):
        times = op.out[dim + extra] // extent if extent else 0
        if times:
            outers = sorted({1, *op.outers})
            found += [Strategy((Shard(dim, n),), (Shard(dim + extra, n * times),)) for n in outers]
    return found


@rule(aten.slice_backward, aten.select_backward)
def slice_backward(op: Op) -> list[Strategy]:
    ndim = len(op.out)
    chosen = int(op.arg("dim")) % ndim
    shift = op.node.target is aten.select_backward.default
    found = [Strategy((P,), (P,))] + [
        Strategy((Shard(dim - (shift and dim > chosen)),), (Shard(dim),))
        for dim in shards(ndim, skip=[chosen])
    ]
    if shift:
        return [*found, Strategy((R,), (Shard(chosen),))]
    if int(op.arg("step")) == 1:
        found += [
            Strategy((Shard(chosen, count),), (Shard(chosen, outer),))
            for outer, count in _slice_parts(op, op.out[chosen], op.shapes[0][chosen])
        ]
    return found


@rule(aten.slice_scatter)
def slice_scatter(op: Op) -> list[Strategy]:
    return [op.same(P)] + [op.same(Shard(dim)) for dim in shards(len(op.out), skip=[op.dim()])]


@rule(aten.select_scatter)
def select_scatter(op: Op) -> list[Strategy]:
    chosen = op.dim()
    return [op.same(P)] + [
        Strategy((Shard(dim), Shard(dim - (dim > chosen))), (Shard(dim),))
        for dim in shards(len(op.out), skip=[chosen])
    ]


@rule(
    aten.zeros, aten.ones, aten.full, aten.empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty
)
def uniform_factory(op: Op) -> list[Strategy]:
    """The same number everywhere: any shard of it can be made locally, whatever the tensor that it is made like."""
    likes: list[tuple[Placement, ...]] = [(R,) * len(op.tensors)]
    likes += [(placement,) for tensor in op.tensors[:1] for placement in _any_placement(tensor)]
    outputs: list[Placement] = [R, *(Shard(dim) for dim in range(len(op.out)))]
    return [Strategy(like, (output,)) for like in likes for output in outputs]


def _any_placement(tensor: fx.Node) -> list[Placement]:
    return [P, *(Shard(dim) for dim in range(len(shape_of(tensor))))]


@rule(aten.tril, aten.triu)
def triangle(op: Op) -> list[Strategy]:
    return [Strategy((P,), (P,))] + [op.same(Shard(dim)) for dim in range(len(op.out) - 2)]
