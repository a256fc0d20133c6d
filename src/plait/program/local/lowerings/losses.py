"""Means over elements that lie on several ranks: the local sum over the global count or weight."""

import torch

from plait.program.local.lowering import Local, Site, lower
from plait.program.place.rules.base import aten


@lower(aten.mean)
def mean(site: Site) -> Local:
    """Over sharded elements: the local sum over the global count."""
    if not site.is_partial():
        return site.same(*site.args)
    source, result = site.node.args[0].meta["val"], site.node.meta["val"]  # type: ignore[union-attr]
    count = source.numel() // max(result.numel(), 1)
    target = aten.sum.default if site.node.target is aten.mean.default else aten.sum.dim_IntList
    return site.emit(aten.div.Tensor, site.emit(target, *site.args, **site.kwargs), float(count))


_LOSSES = {
    aten.mse_loss: 2, aten.smooth_l1_loss: 2, aten.huber_loss: 2, aten.binary_cross_entropy: 3,
    aten.binary_cross_entropy_with_logits: 4, aten.soft_margin_loss: 2,
}  # fmt: skip


@lower(*_LOSSES)
def elementwise_loss(site: Site) -> Local:
    position = _LOSSES[site.node.target.overloadpacket]  # type: ignore[union-attr]
    reduction = site.args[position] if len(site.args) > position else 1
    if reduction != 1 or not site.is_partial():
        return site.same(*site.args)
    filled = [*site.args, *([None] * (position - len(site.args)))][:position]
    total = site.same(*filled, 2, *site.args[position + 1 :])
    shapes = [arg.meta["val"].shape for arg in site.node.args[:2]]  # type: ignore[union-attr]
    count = torch.broadcast_shapes(*shapes).numel()  # type: ignore[no-untyped-call]
    return site.emit(aten.div.Tensor, total, float(count))


_LOSS_GRADIENTS = {
    aten.mse_loss_backward: 3, aten.smooth_l1_loss_backward: 3, aten.huber_loss_backward: 3,
    aten.binary_cross_entropy_backward: 4, aten.soft_margin_loss_backward: 3,
}  # fmt: skip


@lower(*_LOSS_GRADIENTS)
def elementwise_loss_backward(site: Site) -> Local:
    """The gradient of a mean divides by the number of elements over all ranks."""
    position = _LOSS_GRADIENTS[site.node.target.overloadpacket]  # type: ignore[union-attr]
    reduction = site.args[position] if len(site.args) > position else 1
    if reduction != 1:
        return site.same(*site.args)
    grad = site.emit(aten.div.Tensor, site.args[0], float(site.node.meta["val"].numel()))
    filled = [*site.args[1:], *([None] * (position - len(site.args)))][: position - 1]
    return site.same(grad, *filled, 2, *site.args[position + 1 :])
