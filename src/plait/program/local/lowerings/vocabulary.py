"""Tables cut by rows: an embedding finds the rows that a rank has, and a loss the classes that it has.

No rank ever sees a whole row of logits: the others add what it lacks.
"""

import operator

import torch
from torch import Tensor

from plait.program.local.communicate import all_reduce
from plait.program.local.lowering import Local, Site, lower
from plait.program.local.lowerings.own_shard import (
    cutting,
    in_range,
    of_input,
    of_output,
    own_index,
    own_shard,
)
from plait.program.place.rules.base import aten


def own_rows(
    weight: Tensor, index: Tensor, outer: int, part: int, own: int, per_unit: int, offset: int
) -> Tensor:
    """The rows that this rank has, zeros for the others."""
    local, inside = own_index(in_range(index, outer * part), outer, part, own, per_unit, offset)
    rows = aten.embedding.default(weight, local)
    return rows.masked_fill_(~inside.unsqueeze(-1), 0)  # type: ignore[no-any-return]


@lower(aten.embedding)
def embedding(site: Site) -> Local:
    table = site.node.args[0].meta["val"]  # type: ignore[union-attr]
    own = own_shard(site, of_input(site, 0), 0, table.shape[0])
    if own is None:
        return site.same(*site.args)
    return site.emit(own_rows, site.args[0], site.args[1], *own.arguments)


def own_rows_gradient(
    grad: Tensor,
    index: Tensor,
    padding: int,
    by_count: bool,
    outer: int,
    part: int,
    own: int,
    per_unit: int,
    offset: int,
) -> Tensor:
    """The gradient of the rows that this rank has; all others go to one more row, which is dropped."""
    local, inside = own_index(index, outer, part, own, per_unit, offset)
    spare = outer * own
    local = local.masked_fill(~inside | (index == padding), spare)
    return aten.embedding_dense_backward.default(grad, local, spare + 1, spare, by_count)[:spare]  # type: ignore[no-any-return]


@lower(aten.embedding_dense_backward)
def embedding_backward(site: Site) -> Local:
    own = own_shard(site, of_output(site), 0, site.node.meta["val"].shape[0])
    if own is None:
        return site.same(*site.args)
    grad, index, _, padding, by_count = site.args
    return site.emit(own_rows_gradient, grad, index, padding, by_count, *own.arguments)


def class_weights(labels: Tensor, weight: Tensor | None, ignored: int, like: Tensor) -> Tensor:
    """The weight of every label; 0 where it is ignored."""
    kept = labels != ignored
    if weight is None:
        return kept.to(like.dtype)
    return weight[labels.masked_fill(~kept, 0)].masked_fill(~kept, 0)


def own_losses(
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    outer: int,
    part: int,
    own: int,
    per_unit: int,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """(loss, weight) of the labels whose class this rank has, by label or summed; the weight is that of all labels."""
    labels = in_range(labels, outer * part, ignored=ignored)
    weights = class_weights(labels, weight, ignored, scores)
    local, inside = own_index(labels, outer, part, own, per_unit, offset)
    inside &= labels != ignored
    if own == 0:
        losses = torch.zeros_like(weights)
    else:
        picked = scores.gather(1, local.masked_fill(~inside, 0).unsqueeze(1)).squeeze(1)
        losses = (picked * weights).neg_().masked_fill_(~inside, 0)
    if reduction == 0:
        return losses, scores.new_zeros(())
    return losses.sum(), weights.sum()


@lower(aten.nll_loss_forward, aten.nll_loss2d_forward, empty=True)
def cross_entropy(site: Site) -> Local:
    """A mean in the middle of a graph: the local sum over the weight of all ranks."""
    scores, labels, class_weight, reduction, ignored = site.args
    placements = of_input(site, 0)
    global_scores = site.node.args[0].meta["val"]  # type: ignore[union-attr]
    own = own_shard(site, placements, 1, global_scores.shape[1]) if global_scores.ndim > 1 else None
    apart = [i for dim in range(global_scores.ndim) if dim != 1 for i in cutting(site, placements, dim)]
    if own is None and (reduction != 1 or not apart):
        return site.same(*site.args)
    kind = reduction if reduction == 0 else 2
    if own is None:
        both = site.same(scores, labels, class_weight, kind, ignored)
    else:
        both = site.emit(own_losses, scores, labels, class_weight, kind, ignored, *own.arguments)
    total, weight = (site.emit(operator.getitem, both, index) for index in (0, 1))
    if reduction == 1:
        for index in sorted(apart):
            weight = site.emit(all_reduce, weight, site.axes[index].name)
        total = site.emit(aten.div.Tensor, total, weight)
    return [total, weight]


def own_gradients(
    grad: Tensor,
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
    outer: int,
    part: int,
    own: int,
    per_unit: int,
    offset: int,
) -> Tensor:
    """The gradient of the scores of the classes that this rank has."""
    values = class_weights(labels, weight, ignored, scores) * -grad
    if reduction == 1:
        values = values / total_weight
    local, inside = own_index(labels, outer, part, own, per_unit, offset)
    inside &= labels != ignored
    result = torch.zeros_like(scores)
    if own == 0:
        return result
    local = local.masked_fill(~inside, 0)
    return result.scatter_(1, local.unsqueeze(1), values.masked_fill(~inside, 0).unsqueeze(1))


@lower(aten.nll_loss_backward, aten.nll_loss2d_backward)
def cross_entropy_backward(site: Site) -> Local:
    extent = site.node.meta["val"].shape[1] if site.node.meta["val"].ndim > 1 else 1
    own = own_shard(site, of_output(site), 1, extent)
    if own is None:
        return site.same(*site.args)
    return site.emit(own_gradients, *site.args, *own.arguments)
