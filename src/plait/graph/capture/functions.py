"""Torch functions that capture takes as ops of our own: batch norm and LSTM here, attention in `attention_op`.

In: calls that the user's model makes while it is traced. Out: calls of `plait::` ops, or of plain torch functions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import JobError
from plait.graph.capture.marks import Marks
from plait.graph.capture.refusal import refuse_other_devices
from plait.graph.ops.attention import AttentionCapture
from plait.graph.ops.batch_norm import batch_norm
from plait.graph.ops.lstm import stacked_lstm


class FunctionCapture(AttentionCapture):
    """Replace functions that depend on the device or on the whole batch by ops that plans can partition."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._marks.grad_mode()
        self._marks.source_line()
        refuse_other_devices(func, args, kwargs or {})
        if func is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        if func is torch.lstm and _suits_lstm_op(args):
            x, state, weights, _, layers, dropout, _, bidirectional, batch_first = args
            return stacked_lstm(x, state, weights, layers, dropout, bidirectional, batch_first)
        return super().__torch_function__(func, types, args, dict(kwargs or {}))


def _suits_lstm_op(args: Sequence[Any]) -> bool:
    """Training, with biases, without projections, on sequences of one length (not packed)."""
    if len(args) != 9 or isinstance(args[1], Tensor):
        return False
    x, _, weights, has_biases, layers, _, train, bidirectional, _ = args
    plain = len(weights) == 4 * layers * (2 if bidirectional else 1)
    return bool(has_biases and train and plain and x.ndim == 3 and not torch.is_autocast_enabled("cpu"))


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        channels = x.shape[1]
        if x.numel() == channels:
            raise JobError(
                f"batch norm needs more than one value per channel to train; a micro-batch gives it {tuple(x.shape)}.",
                fix="choose batch and accumulate so that no micro-batch, the last of an epoch too, has one sample.",
            )
        dtype = weight.dtype if weight is not None else x.dtype
        mean = running_mean if running_mean is not None else x.new_zeros(channels, dtype=dtype)
        var = running_var if running_var is not None else x.new_ones(channels, dtype=dtype)
        output, _, _, new_mean, new_var = batch_norm(x, weight, bias, mean, var, momentum, eps)
        if running_mean is not None and running_var is not None:
            running_mean.copy_(new_mean)
            running_var.copy_(new_var)
        return output  # type: ignore[no-any-return]
    assert running_mean is not None and running_var is not None
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    return x * scale.view(shape) + shift.view(shape)
