"""Ops that move elements without computing: views, splits, joins, indexing with constants, factories."""

from math import prod

from plait.program.rules.base import Op, P, R, Shard, Strategy, aten, rule, shards


@rule(aten.view, aten._unsafe_view, aten.reshape, aten._reshape_copy)
def view(op: Op) -> list[Strategy]:
    """A shard survives where the cut digit of the index still has a dim of the result to stand in."""
    found = [Strategy((P,), (P,))]
    for source, result in view_groups(op.shapes[0], op.out):
        for dim in source:
            before = prod(op.shapes[0][d] for d in source if d < dim)
            for outer in {1, *op.outers}:
                image = _image(op, result, before * outer)
                if (
                    op.shapes[0][dim] % outer == 0
                    and op.axis.divides(op.shapes[0][dim] // outer)
                    and image is not None
                ):
                    found.append(Strategy((Shard(dim, outer),), (image,)))
    return found


def _image(op: Op, result: list[int], lead: int) -> Shard | None:
    """The result's dim in which the units after `lead` leading parts are the next digit."""
    before = 1
    for dim in result:
        extent = op.out[dim]
        if lead % before == 0 and before <= lead < before * extent:
            outer = lead // before
            fits = extent % outer == 0 and op.axis.divides(extent // outer)
            return Shard(dim, outer) if fits else None
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
    return ([] if pads else [Strategy((P,), (P,))]) + [
        op.same(Shard(dim)) for dim in shards(len(op.out), skip=touched)
    ]


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
    chosen, ndim = op.dim(), len(op.shapes[0])
    return [Strategy((P,), (P,))] + [
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
    return [op.same(P)] + [op.same(Shard(dim)) for dim in shards(len(op.shapes[0]), skip=[op.dim()])]


@rule(aten.unbind)
def unbind(op: Op) -> list[Strategy]:
    chosen, count = op.dim(), len(op.outputs)
    return [op.same(P)] + [
        Strategy((Shard(dim),), (Shard(dim - (dim > chosen)),) * count)
        for dim in shards(len(op.shapes[0]), skip=[chosen])
    ]


@rule(aten.cat)
def cat(op: Op) -> list[Strategy]:
    if any(len(shape) != len(op.out) for shape in op.shapes):
        return []
    return [op.same(P)] + [op.same(Shard(dim)) for dim in shards(len(op.out), skip=[op.dim()])]


@rule(aten.stack)
def stack(op: Op) -> list[Strategy]:
    new = int(op.arg("dim")) % len(op.out)
    return [op.same(P)] + [
        Strategy((Shard(dim - (dim > new)),) * len(op.tensors), (Shard(dim),))
        for dim in shards(len(op.out), skip=[new])
    ]


@rule(aten.repeat)
def repeat(op: Op) -> list[Strategy]:
    extra = len(op.out) - len(op.shapes[0])
    return [Strategy((P,), (P,))] + [
        Strategy((Shard(dim),), (Shard(dim + extra),))
        for dim in range(len(op.shapes[0]))
        if op.shapes[0][dim] == op.out[dim + extra]
    ]


@rule(aten.slice_backward, aten.select_backward)
def slice_backward(op: Op) -> list[Strategy]:
    ndim = len(op.out)
    chosen = int(op.arg("dim")) % ndim
    shift = op.node.target is aten.select_backward.default
    return [Strategy((P,), (P,))] + [
        Strategy((Shard(dim - (shift and dim > chosen)),), (Shard(dim),))
        for dim in shards(ndim, skip=[chosen])
    ]


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
    """The same number everywhere: any piece of it can be made locally."""
    return [Strategy((R,) * len(op.tensors), (Shard(dim),)) for dim in range(len(op.out))]


@rule(aten.tril, aten.triu)
def triangle(op: Op) -> list[Strategy]:
    return [Strategy((P,), (P,))] + [op.same(Shard(dim)) for dim in range(len(op.out) - 2)]
