"""Reductions, normalizations, softmax, cross-entropy, pooling: dims that meet, and dims that stay apart."""

from plait.program.place.rules.base import Op, P, R, Shard, Strategy, aten, ours, rule, shards
from plait.torch_private.ops import schema_of


@rule(
    aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.any, aten.all,
    aten.prod, aten.logsumexp, aten.var, aten.std, aten.var_mean, aten.linalg_vector_norm, aten.norm,
)  # fmt: skip
def reduction(op: Op) -> list[Strategy]:
    """Dims that are kept pass through; a sum or mean over sharded elements is a partial sum."""
    ndim = len(op.shapes[0])
    reduced, kept = _dims(op, ndim)
    outputs = len(op.outputs)
    found = []
    for dim in shards(ndim, skip=reduced):
        result = dim if kept else dim - sum(r < dim for r in reduced)
        found.append(Strategy((Shard(dim), *(R,) * (len(op.tensors) - 1)), (Shard(result),) * outputs))
    if op.node.target in (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim):
        found += [Strategy((Shard(dim),), (P,)) for dim in reduced]
        found.append(Strategy((P,), (P,)))
    elif op.node.target in _ASSOCIATIVE and _is_associative(op):  # the lowering exchanges the ranks' results
        found += [Strategy((Shard(dim),), (R,)) for dim in reduced]
    return found


_ASSOCIATIVE = {
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.any.default, aten.any.dim,
    aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims, aten.prod.default, aten.prod.dim_int,
    aten.logsumexp.default, aten.linalg_vector_norm.default,
}  # fmt: skip


def _is_associative(op: Op) -> bool:
    return op.node.target is not aten.linalg_vector_norm.default or op.arg("ord") in (1, 2, float("inf"))


def _dims(op: Op, ndim: int) -> tuple[list[int], bool]:
    names = [argument.name for argument in schema_of(op.node.target).arguments]
    dims = op.arg("dim") if "dim" in names else None
    if len(op.tensors) == 2:  # max(a, b) is pointwise
        return list(range(ndim)), False
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(ndim)), bool(op.arg("keepdim")) if "keepdim" in names else False
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [int(dim) % max(ndim, 1) for dim in listed], bool(
        op.arg("keepdim")
    ) if "keepdim" in names else False


@rule(
    aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data
)  # fmt: skip
def softmax(op: Op) -> list[Strategy]:
    """Every dim may be cut: where a row is on several ranks, the lowering exchanges its peak and sum."""
    return [op.same(Shard(dim)) for dim in range(len(op.shapes[0]))]


@rule(aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.sort, aten.topk)
def along_one_dim(op: Op) -> list[Strategy]:
    """Elements of one dim meet; the others are independent."""
    found = [op.same(Shard(dim)) for dim in shards(len(op.shapes[0]), skip=[op.dim()])]
    return [*found, op.same(P)] if op.node.target is aten.cumsum.default else found


@rule(aten.glu, aten.glu_backward)
def glu(op: Op) -> list[Strategy]:
    """The dim is two halves that meet element by element: each of them may be cut."""
    ndim, dim = len(op.shapes[0]), int(op.arg("dim")) % len(op.shapes[0])
    found = [op.same(Shard(other)) for other in shards(ndim, skip=[dim])]
    for outer in sorted({1, *op.outers} | {n // 2 for n in op.outers if n % 2 == 0}):
        half, both = Shard(dim, outer), Shard(dim, 2 * outer)
        if op.node.target is aten.glu.default:
            found.append(Strategy((both,), (half,)))
        else:
            found.append(Strategy((half, both), (both,)))
    return found


@rule(aten.native_layer_norm)
def layer_norm(op: Op) -> list[Strategy]:
    """Rows are independent; where they are cut themselves, the lowering exchanges their statistics."""
    outer = len(op.shapes[0]) - len(op.arg("normalized_shape"))
    found = [op.by_name((Shard(dim),) * len(op.outputs), input=Shard(dim)) for dim in range(outer)]
    for dim in range(outer, len(op.shapes[0])):
        own = Shard(dim - outer)
        found.append(op.by_name((Shard(dim), R, R), input=Shard(dim), weight=own, bias=own))
    return found


@rule(aten.native_layer_norm_backward)
def layer_norm_backward(op: Op) -> list[Strategy]:
    outer = len(op.shapes[0]) - len(op.arg("normalized_shape"))
    weights = (P,) * (len(op.outputs) - 1)
    found = [
        op.by_name((Shard(d), *weights), grad_out=Shard(d), input=Shard(d), mean=Shard(d), rstd=Shard(d))
        for d in range(outer)
    ]
    for dim in range(outer, len(op.shapes[0])):
        own, cut = Shard(dim - outer), Shard(dim)
        found.append(op.by_name((cut, own, own), grad_out=cut, input=cut, weight=own, bias=own))
    return found


@rule(aten.native_group_norm)
def group_norm(op: Op) -> list[Strategy]:
    return [op.by_name((Shard(0),) * 3, input=Shard(0))]


@rule(aten.native_group_norm_backward)
def group_norm_backward(op: Op) -> list[Strategy]:
    return [op.by_name((Shard(0), P, P), grad_out=Shard(0), input=Shard(0), mean=Shard(0), rstd=Shard(0))]


@rule(aten._weight_norm_interface, aten._weight_norm_interface_backward)
def weight_norm(op: Op) -> list[Strategy]:
    """Every slice along its dim has a norm of its own."""
    own = Shard(int(op.arg("dim")))
    return [Strategy((own,) * len(op.shapes), (own,) * len(op.outputs))]


@rule(ours.batch_norm)
def batch_norm(op: Op) -> list[Strategy]:
    """Statistics are those of all ranks (the lowering reduces them), so they and the new buffers are replicated."""
    return [op.by_name((Shard(0), R, R, R, R), x=Shard(0))]


@rule(ours.batch_norm_backward)
def batch_norm_backward(op: Op) -> list[Strategy]:
    return [op.by_name((Shard(0), P, P), grad=Shard(0), x=Shard(0))]


@rule(aten.native_batch_norm, aten.native_batch_norm_backward)
def channel_norm(op: Op) -> list[Strategy]:
    """Instance norm folds the samples into the channels, which are independent."""
    channels = op.shapes[0][1]
    if op.shapes[0][0] != 1:
        return []
    inputs = tuple(Shard(1) if len(s) > 1 else (Shard(0) if s == (channels,) else R) for s in op.shapes)
    outputs = tuple(Shard(1) if len(s) > 1 else Shard(0) for s in op.outputs)
    return [Strategy(inputs, outputs)]


@rule(aten.nll_loss_forward, aten.nll_loss2d_forward)
def cross_entropy(op: Op) -> list[Strategy]:
    """A shard gives a part of the sum and of the weight; the lowering of a mean divides by the weight of all ranks.

    Where classes are cut, every rank knows all labels and so their weight, and adds the losses of its own classes.
    """
    reduction = op.arg("reduction")
    if len(op.shapes[0]) < 2:
        return []
    found = [op.by_name((P, R), self=Shard(1))]
    for dim in shards(len(op.shapes[0]), skip=[1]):
        own = dim - (dim > 1)
        outputs = (Shard(own), R) if reduction == 0 else (P, P) if reduction == 2 else (P, R)
        found.append(op.by_name(outputs, self=Shard(dim), target=Shard(own)))
    return found


@rule(aten.nll_loss_backward, aten.nll_loss2d_backward)
def cross_entropy_backward(op: Op) -> list[Strategy]:
    if len(op.out) < 2:
        return []
    reduction = op.arg("reduction")
    found = [op.by_name((Shard(1),), self=Shard(1)), op.by_name((P,), grad_output=P)]
    for dim in shards(len(op.out), skip=[1]):
        own = Shard(dim - (dim > 1))
        inputs = {"grad_output": own if reduction == 0 else R, "self": Shard(dim), "target": own}
        found.append(op.by_name((Shard(dim),), **inputs))
        if reduction != 1:  # the weight is not looked at
            found.append(op.by_name((Shard(dim),), **inputs, total_weight=P))
    return found


@rule(
    aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward, aten.adaptive_max_pool2d,
    aten.adaptive_max_pool2d_backward,
    aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward, aten.avg_pool3d, aten.avg_pool3d_backward,
    aten._adaptive_avg_pool3d, aten._adaptive_avg_pool3d_backward,
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d,
    aten.upsample_linear1d, aten.upsample_trilinear3d, aten.upsample_nearest3d,
    aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward, aten.upsample_bilinear2d_backward,
    aten.upsample_bicubic2d_backward, aten.upsample_linear1d_backward, aten.upsample_trilinear3d_backward,
    aten.upsample_nearest3d_backward, aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d,
    aten.replication_pad2d, aten.reflection_pad1d_backward, aten.reflection_pad2d_backward,
    aten.replication_pad1d_backward, aten.replication_pad2d_backward,
)  # fmt: skip
def per_image(op: Op) -> list[Strategy]:
    """Samples and channels, the dims before the spatial ones, are independent."""
    spatial = next(count for count in (1, 2, 3) if f"{count}d" in str(op.node.target))
    return [op.same(Shard(dim)) for dim in range(len(op.shapes[0]) - spatial)]


@rule(aten.grid_sampler_2d, aten.im2col, aten.col2im, aten.pixel_shuffle, aten.pixel_unshuffle)
def per_sample(op: Op) -> list[Strategy]:
    return [op.same(Shard(0))]
