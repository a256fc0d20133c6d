"""How much a loss weighs that the user's own code computed, read off its autograd graph.

In: a scalar with its history. Out: what makes shares of a batch add up exactly: the labels that count in a
cross-entropy, the elements of a mean, the count that a sum was divided by; or that it is a sum. Nothing where the
history does not tell: then the loss counts as a mean over its samples. The means are those that captured steps know.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.job.job import Job
from plait.torch_private.autograd import is_number, saved

_MEAN, _SUM = 1, 2
"""`at::Reduction` of torch's losses."""
_LABELS = ("NllLossBackward0", "NllLoss2DBackward0")
_LOSSES = ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "SoftMarginLoss")
_SAME = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Neg")
_SCALED = ("MulBackward", "DivBackward")
_ADDED = ("AddBackward", "SubBackward")
_SUMMED = ("SumBackward", "DotBackward")
_OF_PARAMETERS = (
    *(*_SAME, *_SCALED, *_ADDED, *_SUMMED, "MeanBackward", "PowBackward", "AbsBackward", "SqrtBackward"),
    *(
        "NormBackward",
        "LinalgVectorNorm",
        "StackBackward",
        "CatBackward",
        "TBackward",
        "ExpBackward",
        "LogBackward",
    ),
)
"""Ops of a penalty on weights, none of which looks anything up by what is in a batch."""
_LONGEST = 4096
"""Nodes of a penalty that are looked at, at most: one of all weights of a large model."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A loss that is a mean with a weight, or a sum over samples."""

    weight: float | None
    """Of a mean; None: it is a sum."""
    counts: tuple[Any, ...] | None = None
    """What is counted, where it is known; None: something that the user's code has counted."""


def read_loss(
    loss: Tensor, num_samples: int, whole: float | None = None, fixed: float | None = None
) -> Reading | None:
    """What the loss of a share of `num_samples` samples is; a sum over `whole`, what all shares count, is a sum.

    `fixed`: what sums are divided by in shares of any size (`fixed_divisor`); 0: they are divided by what a share
    counts; None: it is not known which.
    """
    if loss.grad_fn is None:
        return None
    found = _read(loss.grad_fn, _Share(num_samples, whole, fixed))
    if found is not None and found.counts is None and found.weight is not None and found.weight <= 1:
        nothing = float(loss.detach()) == 0.0  # a count of nothing that was kept from being 0
        found = Reading(0.0) if nothing else found if found.weight == 1 else None
    return found


def total_and_weight(
    job: Job,
    batch: Any,
    num_samples: int,
    result: Tensor | tuple[Tensor, Tensor],
    num_whole: int | None = None,
    fixed: float | None = None,
    by_samples: bool = False,
) -> tuple[Tensor, Tensor]:
    """The objective's result as (total, weight), by what it is a mean of where that can be told, else by samples.

    `num_whole` are the samples of all ranks: a sum over this share's is so much of the sum over theirs. `fixed`: see
    `read_loss`. `by_samples`: losses of several samples do not tell; that of one may seem to.
    """
    if not isinstance(result, Tensor):
        total, weight = result
        return total, weight.to(total.dtype)
    weight = result.new_tensor(float(num_samples))
    reading = None if by_samples else read_loss(result, num_samples, fixed=fixed)
    loss = job.loss
    if reading is not None and reading.weight is None:
        return result * float(num_whole or num_samples), weight
    if reading is not None:
        weight = result.new_tensor(reading.weight)
    elif isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.reduction == "mean":
        target = batch[-1]  # without a history, as in evaluation
        if not target.is_floating_point():
            keep = target != loss.ignore_index
            weight = keep.sum().to(result.dtype)
            if loss.weight is not None:
                weight = (loss.weight.to(result)[target * keep] * keep).sum()
    return torch.where(weight > 0, result * weight, torch.zeros_like(result)), weight


@dataclass(frozen=True, slots=True)
class _Share:
    """What is known of a share."""

    num_samples: int
    whole: float | None
    fixed: float | None


def divisor_of(loss: Tensor) -> float | None:
    """The number of Python's that a sum was divided by, if the loss is such a sum."""
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        name, behind = type(node).__name__, _behind(node) if node is not None else []
        if name.startswith("DivBackward") and len(behind) == 1:
            divisor, inside = saved(node, "other"), _read(behind[0], _Share(1, None, None))
            single = not isinstance(divisor, Tensor) or divisor.numel() == 1
            if single and is_number(divisor) and inside is not None and inside.weight is None:
                return float(divisor)
            stack += behind
        elif name.startswith((*_SAME, *_SCALED, *_ADDED)):
            stack += behind
    return None


def fixed_divisor(few: float | None, more: float | None) -> float | None:
    """Of losses of few samples and of more: what sums are divided by, whatever the size; 0: by what they count."""
    if few is None or more is None:
        return None
    return few if few == more else 0.0


def _read(node: Any, share: _Share) -> Reading | None:
    name = type(node).__name__
    if name in _LABELS and saved(node, "reduction") == _MEAN:
        target, weight = saved(node, "target"), saved(node, "weight")
        at = (target.data_ptr(), saved(node, "ignore_index"), weight.data_ptr() if weight is not None else 0)
        return Reading(float(saved(node, "total_weight")), ("labels", *at))
    if name.startswith("MeanBackward"):
        count = saved(node, "self_sym_numel")
        return Reading(float(count), ("elements", count))
    if name.startswith(_LOSSES) and saved(node, "reduction") == _MEAN:
        count = max(saved(node, "self").numel(), saved(node, "target").numel())
        return Reading(float(count), ("elements", count))
    if _adds_up(node):
        return Reading(None)
    behind = _behind(node)
    if name.startswith("DivBackward") and len(behind) == 1:
        inside = _read(behind[0], share)
        is_sum = inside is not None and inside.weight is None
        return _divided(saved(node, "other"), share) if is_sum else inside
    if name.startswith((*_SAME, *_SCALED)) and len(behind) == 1:
        return _read(behind[0], share)
    if name.startswith(_ADDED):
        found = [_read(entry, share) for entry in behind if not _is_penalty(entry)]
        first = found[0] if found else None
        if len(found) < len(behind) and (first is None or first.weight is None):
            return None  # a penalty beside a sum would be counted once a share
        if any(entry is not None and entry.weight is None for entry in found):
            return Reading(None) if all(_is_of_whole(entry, share.whole) for entry in found) else None
        return first if first is not None and all(_alike(first, entry) for entry in found[1:]) else None
    return None


def _behind(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _is_of_whole(reading: Reading | None, whole: float | None) -> bool:
    """Whether it is a sum, or one that was divided by so many times what all shares count (labels times classes)."""
    if reading is None or reading.weight is None or not whole:
        return reading is not None and reading.weight is None
    return reading.counts is None and reading.weight % whole == 0


def _divided(divisor: Tensor | float, share: _Share) -> Reading | None:
    """A sum by a count of something in the share is a mean; by a number that does not follow the share, a sum."""
    if isinstance(divisor, Tensor) and divisor.numel() != 1:
        return None
    count = float(divisor)
    if count == share.whole:
        return Reading(None)
    if is_number(divisor) and share.fixed is not None:
        return Reading(None) if count == share.fixed or count <= 0 else Reading(count)
    if is_number(divisor):
        follows = count > 0 and share.num_samples > 0 and count % share.num_samples == 0
        return Reading(count) if follows else Reading(None)
    return Reading(count) if 0 <= count <= 1 or count == int(count) else None


def _alike(first: Reading, second: Reading | None) -> bool:
    """Whether two means have one weight, and not by chance; or both are sums."""
    if second is None or first.weight != second.weight:
        return False
    kinds = {entry.counts[0] for entry in (first, second) if entry.counts is not None}
    return first.counts == second.counts or "elements" not in kinds


def _adds_up(node: Any) -> bool:
    """A sum, or sums put together linearly: the sum over shares is the whole."""
    name = type(node).__name__
    if name.startswith(_SUMMED):
        return True
    if name in _LABELS or name.startswith(_LOSSES):
        return bool(saved(node, "reduction") == _SUM)
    behind = _behind(node)
    if name.startswith((*_SAME, "MulBackward")):
        return len(behind) == 1 and _adds_up(behind[0])
    return name.startswith(_ADDED) and len(behind) == 2 and all(map(_adds_up, behind))


def _is_penalty(node: Any) -> bool:
    """Whether it is computed from parameters alone, so that every share has the same."""
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        name = type(current).__name__
        if current in seen or name == "AccumulateGrad":
            continue
        seen.add(current)
        behind = _behind(current)
        scaled = name.startswith(_SCALED) and len(behind) == 1 and is_number(saved(current, "other"))
        whole = len(behind) == len(current.next_functions) or scaled or name.startswith(_ADDED)
        if not name.startswith(_OF_PARAMETERS) or not whole or len(seen) > _LONGEST:
            return False
        stack += behind
    return True
