"""Ops that treat elements one by one: a shard on any dim passes through; sums pass through what is linear."""

import torch

from plait.graph.ops.ending import ending_named
from plait.plan.plan import DATA
from plait.program.place.rules.base import Op, P, Placement, R, Shard, Strategy, aten, can_be_sum, ours, rule

_UNARY_LINEAR = {aten.neg.default, aten.clone.default, aten.lift_fresh_copy.default}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def aligned(op: Op, dim: int) -> tuple[Placement, ...]:
    """Placements of broadcast inputs so that the output is sharded on `dim`."""
    extent = op.out[dim]
    placements: list[Placement] = []
    for shape in op.shapes:
        own = dim - (len(op.out) - len(shape))
        placements.append(Shard(own) if own >= 0 and shape[own] == extent else R)
    return tuple(placements)


@rule(
    "pointwise", aten.clone, aten._to_copy, aten.lift_fresh_copy, aten.copy, aten.where, aten.masked_fill, aten.fill,
    aten._conj_physical, aten.leaky_relu, aten.leaky_relu_backward, aten.hardtanh_backward,
    aten.elu_backward, aten.softplus_backward, aten.mish_backward, aten.hardswish, aten.hardswish_backward,
    aten.hardsigmoid_backward, aten.hardshrink_backward, aten.softshrink_backward, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward, aten._prelu_kernel, aten._prelu_kernel_backward,
)  # fmt: skip
def pointwise(op: Op) -> list[Strategy]:
    """What torch tags as pointwise, and what it has not tagged though it is."""
    outputs = len(op.outputs)
    found = [
        Strategy(aligned(op, dim), (Shard(dim),) * outputs)
        for dim in range(len(op.out))
        if op.out[dim] != 1
        or op.axis.size == 1  # the only sample of the only rank, which has its own random numbers
    ]
    return found + _partial(op)


def _partial(op: Op) -> list[Strategy]:
    """Sums over ranks that pass through: linear ops of one tensor, sums of sums, products with what is replicated."""
    target, count = op.node.target, len(op.tensors)
    if target is aten._to_copy.default and not op.node.meta["val"].is_floating_point():
        return []
    if target in _UNARY_LINEAR or target is aten._to_copy.default or (target in _SUMS and count == 2):
        return [Strategy((P,) * count, (P,))]
    if target in (aten.lerp.Scalar, aten.where.self) and count > 1:
        return [Strategy((*(R,) * (count - 2), P, P), (P,))]
    if target in (aten.masked_fill.Scalar, aten.where.ScalarOther):
        is_zero = op.arg("value" if target is aten.masked_fill.Scalar else "other") == 0
        linear = (P, R) if target is aten.masked_fill.Scalar else (R, P)
        return [Strategy(linear, (P,))] if is_zero and count == 2 else []
    if target is aten.addcmul.default and count == 3:
        return [Strategy((P, P, R), (P,)), Strategy((P, R, P), (P,))]
    if target in _PRODUCTS:
        found = [Strategy((P, *(R,) * (count - 1)), (P,))] if op.node.args[0] is op.tensors[0] else []
        if target is aten.mul.Tensor and count == 2:
            found.append(Strategy((R, P), (P,)))
        return found
    return []


@rule(ours.chosen)
def chosen(op: Op) -> list[Strategy]:
    """What holds of two tensors, by a flag that all ranks know."""
    count = len(op.tensors) - 1
    cuts: list[Placement] = [Shard(dim) for dim in range(len(op.out))]
    sums: list[Placement] = [P] if can_be_sum(op) else []
    return [Strategy((R, *(cut,) * count), (cut,)) for cut in (*cuts, *sums)]


@rule(ours.present)
def present(op: Op) -> list[Strategy]:
    return [*(op.same(Shard(dim)) for dim in range(len(op.out))), op.same(P)]


@rule(ours.unless)
def unless(op: Op) -> list[Strategy]:
    return [Strategy((P, R), (P,))]


@rule(ours.island, ours.island_backward)
def island(op: Op) -> list[Strategy]:
    """Nobody knows what is inside: it is given the whole micro-batch."""
    return []


@rule(ours.ending, outers=True)
def ending(op: Op) -> list[Strategy]:
    """A sum over samples, or given the whole micro-batch."""
    own, wanted = ending_named(op.arg("name")), op.arg("wanted")
    if op.axis.name != DATA or not own.sampled:
        return []
    cut = set(own.sampled)
    return [
        Strategy(
            tuple(Shard(0) if i in cut else R for i in range(len(op.tensors))),
            (P, P, *(Shard(0) if i in cut else P for i in wanted)),
        )
    ]


@rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
def like(op: Op) -> list[Strategy]:
    return [op.same(Shard(dim)) for dim in range(len(op.out))] + [Strategy((P,), (R,))]


@rule(
    aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits, aten.soft_margin_loss,
)  # fmt: skip
def elementwise_loss(op: Op) -> list[Strategy]:
    """Reduced over everything: shards of any dim give a part of the sum (a mean is lowered to sum / count)."""
    if op.arg("reduction") == 0:
        return pointwise(op)
    full = tuple(torch.broadcast_shapes(*op.shapes))  # type: ignore[no-untyped-call]
    return [Strategy(_aligned_to(op, full, dim), (P,)) for dim in range(len(full))]


@rule(
    aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward,
    aten.binary_cross_entropy_backward, aten.soft_margin_loss_backward,
)  # fmt: skip
def elementwise_loss_backward(op: Op) -> list[Strategy]:
    return [Strategy(_aligned_to(op, op.out, dim), (Shard(dim),)) for dim in range(len(op.out))]


def _aligned_to(op: Op, full: tuple[int, ...], dim: int) -> tuple[Placement, ...]:
    placements: list[Placement] = []
    for shape in op.shapes:
        own = dim - (len(full) - len(shape))
        placements.append(Shard(own) if own >= 0 and shape[own] == full[dim] else R)
    return tuple(placements)
