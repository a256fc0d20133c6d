"""A cross-entropy of many classes that never holds log-probabilities: chunks of rows, computed again in the backward.

In: a rank's graph. Out: the same, in which `nll_loss(log_softmax(scores))` and its gradient, found by dataflow, work on
the scores as the last product made them, in 16 bits where it did. Beside these only the logarithm of each row's sum is
kept. Where classes are cut over ranks the loss is another one already (`lowerings/vocabulary.py`), and stays.
"""

import operator
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from plait.nodes import drop_unread
from plait.program.local.lowerings.vocabulary import class_weights

aten = torch.ops.aten

_FEWEST_CLASSES = 1024
"""With fewer there is little to save. The rows do not count: programs of all batch sizes are to be alike."""
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Scores in float32 at a time: 1 MiB stays in a core's cache; 128 MiB keep a GPU busy."""
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_SHORT = (torch.bfloat16, torch.float16)


def _chunks(scores: Tensor) -> Iterator[slice]:
    rows, classes = scores.shape
    if type(scores) is not Tensor:  # traced for a compiler, which makes loops of its own
        yield slice(0, rows)
        return
    size = max(1, _CHUNK_ELEMENTS[scores.device.type] // max(1, classes))
    yield from (slice(start, start + size) for start in range(0, rows, size))


@cache
def _kernels() -> ModuleType | None:
    """Kernels that read scores once, where this machine can build them; chunks are read five times and more."""
    try:
        from plait.program.local import cross_entropy_kernels as kernels

        kernels.sum_rows(torch.zeros(1, 1, device="cuda"))
    except Exception:  # no Triton, no C compiler, a device that it does not know
        return None
    return kernels


def _kernels_for(scores: Tensor, dtype: torch.dtype) -> ModuleType | None:
    fits = scores.device.type == "cuda" and dtype == torch.float32 and scores.stride(1) == 1
    return _kernels() if fits and type(scores) is Tensor else None


def _row_sums(scores: Tensor, dtype: torch.dtype) -> Tensor:
    kernels = _kernels_for(scores, dtype)
    if kernels is not None:
        return kernels.sum_rows(scores)  # type: ignore[no-any-return]
    chunks = [scores[rows].to(dtype).logsumexp(1) for rows in _chunks(scores)]
    return torch.cat(chunks or [scores.new_zeros(0, dtype=dtype)])


def row_losses(
    scores: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignored: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, weight of all labels, logarithm of each row's sum) as `nll_loss_forward` of a log-softmax in `dtype`."""
    scores = scores.flatten(0, -2)
    sums = _row_sums(scores, dtype)
    weights = class_weights(labels, weight, ignored, sums)
    picked = scores.gather(1, labels.masked_fill(labels == ignored, 0).unsqueeze(1)).squeeze(1).to(dtype)
    losses = ((sums - picked) * weights).masked_fill(labels == ignored, 0)
    if reduction == 0:
        return losses, sums.new_zeros(()), sums
    loss, total = losses.sum(), weights.sum()
    return (loss / total if reduction == 1 else loss), total, sums


def row_gradients(
    grad: Tensor,
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
    sums: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the scores, [rows, classes] in `dtype`."""
    scores = scores.flatten(0, -2)
    factors = class_weights(labels, weight, ignored, sums) * grad
    if reduction == 1:
        factors = factors / total
    known = labels.masked_fill(labels == ignored, 0).unsqueeze(1)
    if type(scores) is not Tensor:
        hit = torch.arange(scores.shape[1], device=scores.device) == known
        shares = (scores.to(sums.dtype) - sums.unsqueeze(1)).exp() - hit.to(sums.dtype)
        return (shares * factors.unsqueeze(1)).to(dtype)
    kernels = _kernels_for(scores, sums.dtype)
    if kernels is not None:
        return kernels.gradients(scores, sums, known.squeeze(1), factors, dtype)  # type: ignore[no-any-return]
    result = torch.empty_like(scores, dtype=dtype)
    for rows in _chunks(scores):
        shares = torch.sub(scores[rows], sums[rows].unsqueeze(1)).exp_().mul_(factors[rows].unsqueeze(1))
        shares.scatter_add_(1, known[rows], factors[rows].neg().unsqueeze(1))
        result[rows] = shares
    return result


def without_log_probabilities(graph: fx.Graph) -> None:
    """Rewrite in place what is found."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten._log_softmax.default:
            _rewrite(graph, node)


def _rewrite(graph: fx.Graph, softmax: fx.Node) -> None:
    value = softmax.meta["val"]
    users = {user.target: user for user in softmax.users}
    forward, gradient, backward = (
        users.get(op)
        for op in (
            aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten._log_softmax_backward_data.default,
        )
    )  # fmt: skip
    if forward is None or gradient is None or backward is None or len(softmax.users) != 3:
        return
    alone = set(gradient.users) == {backward} and backward.args[0] is gradient and gradient.args[1] is softmax
    if not alone or value.ndim != 2 or softmax.args[1] not in (1, -1) or value.shape[1] < _FEWEST_CLASSES:
        return
    scores = _source(softmax.args[0])
    labels, weight, reduction, ignored = forward.args[1:]
    forward.target, forward.args = row_losses, (scores, labels, weight, reduction, ignored, value.dtype)
    loss, total = forward.meta["val"]
    forward.meta["val"] = (loss, total, value.new_empty(value.shape[:1]))
    with graph.inserting_after(forward):
        sums = graph.call_function(operator.getitem, (forward, 2))
    sums.meta = {**forward.meta, "val": forward.meta["val"][2]}
    short = _shortened(backward) if scores.meta["val"].dtype in _SHORT else []
    dtype = short[-1].meta["val"].dtype if short else value.dtype
    backward.target = row_gradients
    backward.args = (
        gradient.args[0],
        scores,
        labels,
        weight,
        gradient.args[4],  # a rank's forward may sum what the backward takes the mean of
        ignored,
        gradient.args[6],
        sums,
        dtype,
    )
    backward.meta["val"] = backward.meta["val"].to(dtype)
    for view in short[:-1]:
        view.meta["val"] = view.meta["val"].to(dtype)
    if short:
        cast = short[-1]
        cast.replace_all_uses_with(cast.args[0])  # type: ignore[arg-type]
        graph.erase_node(cast)
    graph.erase_node(gradient)
    drop_unread(softmax)


def _source(scores: Any) -> fx.Node:
    """What scores were before they were widened, row by row the same."""
    current, classes = scores, scores.meta["val"].shape[-1]
    while current.meta["val"].dtype not in _SHORT:
        before = current.args[0] if current.args else None
        widens = current.target is aten._to_copy.default or current.target in _VIEWS
        if not widens or not isinstance(before, fx.Node) or before.meta["val"].shape[-1:] != (classes,):
            return scores  # type: ignore[no-any-return]
        current = before
    return current if current.meta["val"].ndim >= 2 else scores  # type: ignore[no-any-return]


def _shortened(gradient: fx.Node) -> list[fx.Node]:
    """The nodes from a gradient to where it is cast to 16 bits, if nobody sees it before."""
    found: list[fx.Node] = []
    current = gradient
    while len(current.users) == 1:
        current = next(iter(current.users))
        found.append(current)
        if current.target is aten._to_copy.default:
            return found if current.meta["val"].dtype in _SHORT else []
        if current.target not in _VIEWS:
            return []
    return []
