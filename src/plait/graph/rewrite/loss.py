"""Read the objective as (total, weight), so that a mean over the whole batch survives any split of it.

In: a forward graph that returns a scalar loss, or (total, weight). Out: nodes of total and weight with
loss = sum(total) / sum(weight) over all micro-batches and ranks. Known means: cross-entropy (with `ignore_index`, class
weights, label smoothing), mean(), mse and its like, and sum / count where the count depends on the batch alone. Any
other scalar counts as a mean over its samples, and a notice says so.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait.graph.rewrite.functional import out_of_place
from plait.graph.rewrite.new_nodes import adopt, as_scalar, call, constant
from plait.nodes import ancestors

aten = torch.ops.aten

_REDUCTION_ARGUMENT = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.soft_margin_loss.default: 2,
}
_MEAN, _SUM = 1, 2
"""`at::Reduction` of torch's losses."""
_NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_RESHAPES = (
    aten.view.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.squeeze.default,
    aten.alias.default,
)
_SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.neg.default)


@dataclass(frozen=True, slots=True)
class _Mean:
    """A scalar known to be total / weight."""

    total: fx.Node
    weight: fx.Node | float
    key: tuple[Any, ...]
    """Equal for means with the same weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the objective was read."""

    total: fx.Node
    weight: fx.Node
    static_weight: float | None
    """The weight as a number where it is constant."""
    notices: tuple[str, ...] = ()
    """What the user should know about it."""


def read_pair(graph: fx.Graph, total: fx.Node, weight: fx.Node | float) -> Reading:
    """An objective that says itself what its total and its weight are."""
    if not isinstance(weight, fx.Node):
        known = constant(graph, total, float(weight))
        return Reading(total=total, weight=known, static_weight=float(weight))
    return Reading(total=total, weight=as_scalar(graph, weight, total), static_weight=None)


def read_scalar(graph: fx.Graph, loss: fx.Node, num_samples: int, num_parameters: int) -> Reading | None:
    """A loss that is a mean that plait knows; new nodes are added at the end of the graph."""
    parameters = set([node for node in graph.nodes if node.op == "placeholder"][:num_parameters])
    mean = _Reader(graph, num_samples, parameters).read(loss)
    if mean is None:
        return None
    if isinstance(mean.weight, float):
        known = constant(graph, mean.total, mean.weight)
        return Reading(total=mean.total, weight=known, static_weight=mean.weight)
    return Reading(total=mean.total, weight=as_scalar(graph, mean.weight, mean.total), static_weight=None)


def read_unknown(graph: fx.Graph, loss: fx.Node, num_samples: int) -> Reading:
    """Any other loss: a mean over its samples."""
    total = call(graph, aten.mul.Tensor, (loss, float(num_samples)), loss)
    total.meta["grad"] = (
        True  # also of what a hand-written function returns, within which torch notes no history
    )
    notice = (
        "the loss is not a mean that plait knows, so it counts as a mean over its samples; "
        "return (total, weight) from `objective` to say otherwise."
    )
    weight = constant(graph, total, float(num_samples))
    return Reading(total=total, weight=weight, static_weight=float(num_samples), notices=(notice,))


class _Reader:
    """Walks back from the loss through scalar arithmetic to the means it is made of."""

    def __init__(self, graph: fx.Graph, num_samples: int, parameters: set[fx.Node]) -> None:
        self.graph = graph
        self.num_samples = num_samples
        self.parameters = parameters

    def read(self, node: fx.Node) -> _Mean | None:
        if node.op != "call_function" or not node.meta.get("grad", True):
            return None  # inside a hand-written autograd function, or of no influence on a gradient
        target = out_of_place(node.target)
        if target in _RESHAPES and node.meta["val"].numel() == 1:
            return self._rewrap(node, self.read(node.args[0]))  # type: ignore[arg-type]
        if target is aten.mean.default or (target is aten.mean.dim and node.meta["val"].numel() == 1):
            return self._mean(node)
        if target in _REDUCTION_ARGUMENT:
            return self._reduction(node)
        if target is operator.getitem and node.args[1] == 0:
            return self._cross_entropy(node.args[0])  # type: ignore[arg-type]
        if target in (aten.div.Tensor, aten.div.Scalar):
            return self._ratio(node)
        if target in _SCALES:
            return self._scale(node)
        if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            return self._sum_of_means(node)
        return None

    def _mean(self, node: fx.Node) -> _Mean:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        total = call(self.graph, aten.sum.default, (source,), node)
        return _constant_mean(total, source.meta["val"].numel())

    def _reduction(self, node: fx.Node) -> _Mean | None:
        if _reduction_of(node) != _MEAN:
            return None
        position = _REDUCTION_ARGUMENT[node.target]  # type: ignore[index]
        filled = [*node.args, *([None] * (position - len(node.args)))][:position]
        total = call(self.graph, node.target, (*filled, _SUM, *node.args[position + 1 :]), node)
        shapes = [arg.meta["val"].shape for arg in node.args[:2] if isinstance(arg, fx.Node)]
        return _constant_mean(total, torch.broadcast_shapes(*shapes).numel())  # type: ignore[no-untyped-call]

    def _cross_entropy(self, loss: fx.Node) -> _Mean | None:
        if loss.target not in _NLL:
            return None
        scores, labels, class_weight, reduction, ignored = loss.args
        if reduction != _MEAN:
            return None
        both = call(self.graph, loss.target, (scores, labels, class_weight, _SUM, ignored), loss)
        total = self.graph.call_function(operator.getitem, (both, 0))
        adopt(total, loss, both.meta["val"][0])
        keep = call(self.graph, aten.ne.Scalar, (labels, ignored), loss)
        weight = call(self.graph, aten._to_copy.default, (keep,), loss, dtype=scores.meta["val"].dtype)  # type: ignore[union-attr]
        if class_weight is not None:
            safe = call(self.graph, aten.mul.Tensor, (labels, keep), loss)
            picked = call(self.graph, aten.index.Tensor, (class_weight, [safe]), loss)
            weight = call(self.graph, aten.mul.Tensor, (picked, weight), loss)
        weight = call(self.graph, aten.sum.default, (weight,), loss)
        return _Mean(total, weight, ("nll", labels, class_weight, ignored))

    def _ratio(self, node: fx.Node) -> _Mean | None:
        numerator, denominator = node.args[0], node.args[1]
        if not isinstance(denominator, fx.Node):
            scaled = self._scale(node)
            if scaled is not None:
                return scaled
            count = float(denominator)  # type: ignore[arg-type]
            adds_up = isinstance(numerator, fx.Node) and _adds_up(numerator)
            if adds_up and count > 0 and count % self.num_samples == 0:
                return _Mean(numerator, count, ("constant", count))  # type: ignore[arg-type]
            return None
        if (
            denominator.meta["val"].numel() != 1
            or not _is_count(denominator)
            or self._depends_on_model(denominator)
        ):
            return None
        if not isinstance(numerator, fx.Node) or not _adds_up(numerator):
            return None
        return _Mean(numerator, denominator, ("node", _what_is_counted(denominator)))

    def _scale(self, node: fx.Node) -> _Mean | None:
        source = node.args[0]
        factor = node.args[1] if len(node.args) > 1 else None
        if not isinstance(source, fx.Node) or isinstance(factor, fx.Node):
            return None
        return self._rewrap(node, self.read(source))

    def _sum_of_means(self, node: fx.Node) -> _Mean | None:
        left, right = node.args[0], node.args[1]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return None
        first, second = self.read(left), self.read(right)
        if first is None or second is None or not _same_weight(first, second):
            return None
        target = out_of_place(node.target)
        total = call(self.graph, target, (first.total, second.total), node)
        return _Mean(total, first.weight, first.key)

    def _rewrap(self, node: fx.Node, inner: _Mean | None) -> _Mean | None:
        if inner is None:
            return None
        target: Any = out_of_place(node.target)
        total = self.graph.call_function(target, (inner.total, *node.args[1:]), dict(node.kwargs))
        adopt(total, node, node.meta["val"])
        return _Mean(total, inner.weight, inner.key)

    def _depends_on_model(self, node: fx.Node) -> bool:
        return not ancestors([node]).isdisjoint(self.parameters)


def _same_weight(first: _Mean, second: _Mean) -> bool:
    return _counted(first) == _counted(second)


def _counted(mean: _Mean) -> tuple[Any, ...]:
    """The key, with cross-entropy's weight written as the count of labels that it is where classes weigh the same."""
    if mean.key[0] == "nll" and mean.key[2] is None:
        _, labels, _, ignored = mean.key
        return "node", ("labels but", labels, ignored)
    return mean.key


def _is_count(node: fx.Node) -> bool:
    """A sum, possibly cast or reshaped: adds up over shards. A clamped count does not."""
    while node.op == "call_function" and node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "call_function" and node.target in (aten.sum.default, aten.sum.dim_IntList)


def _adds_up(node: fx.Node) -> bool:
    """A sum, or sums put together linearly: the sum over shards is the whole."""
    if node.op != "call_function" or (
        isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].numel() != 1
    ):
        return False
    target, arguments = out_of_place(node.target), node.args
    if target in (aten.sum.default, aten.sum.dim_IntList, aten.dot.default):
        return True
    if target in _REDUCTION_ARGUMENT:
        return bool(_reduction_of(node) == _SUM)
    if target is operator.getitem:
        whole = arguments[0]
        is_nll = isinstance(whole, fx.Node) and whole.target in _NLL and arguments[1] == 0
        return bool(is_nll and whole.args[3] == _SUM)  # type: ignore[union-attr]
    operands = [argument for argument in arguments if isinstance(argument, fx.Node)]
    if target in _RESHAPES or target in _SCALES:
        return len(operands) == 1 and operands[0] is arguments[0] and _adds_up(operands[0])
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return len(operands) == 2 and all(_adds_up(operand) for operand in operands)
    return False


def _reduction_of(node: fx.Node) -> Any:
    position = _REDUCTION_ARGUMENT[node.target]  # type: ignore[index]
    return node.args[position] if len(node.args) > position else _MEAN


def _what_is_counted(node: fx.Node) -> Any:
    """The labels and the one that is ignored, for a count of labels that are not ignored; else what is summed."""
    while node.op == "call_function" and node.target in (*_RESHAPES, aten.sum.default, aten.sum.dim_IntList):
        node = node.args[0]  # type: ignore[assignment]
    if node.op == "call_function" and node.target is aten.ne.Scalar:
        return "labels but", *node.args
    if node.op == "call_function" and node.target in (aten.bitwise_not.default, aten.logical_not.default):
        inner = node.args[0]
        if isinstance(inner, fx.Node) and inner.target is aten.eq.Scalar:
            return "labels but", *inner.args
    return node


def _constant_mean(total: fx.Node, count: int) -> _Mean:
    return _Mean(total, float(count), ("constant", count))
