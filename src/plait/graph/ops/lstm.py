"""One direction of one LSTM layer as an op that plans can partition: samples are independent, time is not cut.

In: a sequence [time, samples, features], weights, the first state. Out: the outputs, the last state, and what the
backward needs. On the CPU in fp32 and bf16 it runs torch's fused oneDNN layer, on CUDA cuDNN's, as eager torch does; in
float64 on the CPU it is written out. Written out op by op, the same layer takes 1.3 to 1.5 times as long.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.graph.ops.recurrent import back_by_cudnn, by_autograd, by_cudnn, is_cudnn, stacked

aten = torch.ops.aten
_LSTM = 2
"""oneDNN's number for this kind of cell, and cuDNN's."""

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("plait::lstm_layer", mutates_args=())
def lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> Four:
    """(outputs [time, samples, width], last h, last c, workspace)."""
    return run_lstm_layer(x, w_ih, w_hh, b_ih, b_hh, h, c, reverse)


@lstm_layer.register_fake
def _(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> Four:
    outputs = x.new_empty(x.shape[0], x.shape[1], h.shape[1])
    return outputs, h.new_empty(h.shape), c.new_empty(c.shape), x.new_empty(0, dtype=torch.uint8)


@torch.library.custom_op("plait::lstm_layer_backward", mutates_args=())
def lstm_layer_backward(
    grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    h: Tensor, c: Tensor, y: Tensor, last_h: Tensor, last_c: Tensor, workspace: Tensor, reverse: bool,
) -> Seven:  # fmt: skip
    """Gradients of the input, the four weights and the first state, each in one piece: who compiles relies on it."""
    return run_lstm_layer_backward(
        grad_y, grad_h, grad_c, x, w_ih, w_hh, b_ih, b_hh, h, c, y, last_h, last_c, workspace, reverse
    )


@lstm_layer_backward.register_fake
def _(
    grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    h: Tensor, c: Tensor, y: Tensor, last_h: Tensor, last_c: Tensor, workspace: Tensor, reverse: bool,
) -> Seven:  # fmt: skip
    tensors = (x, w_ih, w_hh, b_ih, b_hh, h, c)
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)  # type: ignore[return-value]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[3])


def _differentiate(ctx: Any, grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, _: Any) -> tuple[Any, ...]:
    return (*lstm_layer_backward(grad_y, grad_h, grad_c, *ctx.saved_tensors, ctx.reverse), None)


lstm_layer.register_autograd(_differentiate, setup_context=_remember)


def _is_fused(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


def run_lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> Four:
    """The op on real tensors."""
    if x.numel() == 0:
        return (
            x.new_zeros(x.shape[0], x.shape[1], h.shape[1]),
            h.clone(memory_format=torch.contiguous_format),
            c.clone(memory_format=torch.contiguous_format),
            x.new_empty(0, dtype=torch.uint8),
        )
    if is_cudnn(x):
        return by_cudnn(x, (w_ih, w_hh, b_ih, b_hh), h, c, reverse, _LSTM)
    if not _is_fused(x):
        y, last_h, last_c = _plain((x, w_ih, w_hh, b_ih, b_hh, h, c), reverse)
        return y, last_h, last_c, x.new_empty(0, dtype=torch.uint8)
    with torch.enable_grad():  # without it oneDNN keeps no workspace; nothing here requires a gradient
        result: Four = aten.mkldnn_rnn_layer.default(
            x.contiguous(),
            w_ih,
            w_hh,
            b_ih,
            b_hh,
            h,
            c,
            reverse,
            [],
            _LSTM,
            h.shape[1],
            1,
            True,
            False,
            False,
            True,
        )
    return result


def run_lstm_layer_backward(
    grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    h: Tensor, c: Tensor, y: Tensor, last_h: Tensor, last_c: Tensor, workspace: Tensor, reverse: bool,
) -> Seven:  # fmt: skip
    """The gradient on real tensors."""
    found = _gradients(
        grad_y, grad_h, grad_c, x, w_ih, w_hh, b_ih, b_hh, h, c, y, last_h, last_c, workspace, reverse
    )
    return tuple(gradient.contiguous() for gradient in found)  # type: ignore[return-value]


def _gradients(
    grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    h: Tensor, c: Tensor, y: Tensor, last_h: Tensor, last_c: Tensor, workspace: Tensor, reverse: bool,
) -> Sequence[Tensor]:  # fmt: skip
    tensors = (x, w_ih, w_hh, b_ih, b_hh, h, c)
    if x.numel() == 0:
        return [torch.zeros_like(tensor) for tensor in tensors]
    grads = (grad_y, grad_h, grad_c)
    if is_cudnn(x):
        return back_by_cudnn(grads, x, tensors[1:5], h, c, y, workspace, reverse, _LSTM)
    if x.device.type == "cuda":
        return by_autograd(lambda leaves: _plain(leaves, reverse), tensors, grads)
    if not _is_fused(x):
        return _through_time(grad_y, grad_h, grad_c, *tensors, reverse)
    result: Sequence[Tensor] = aten.mkldnn_rnn_layer_backward.default(
        x.contiguous(), w_ih, w_hh, b_ih, b_hh, h, c, y, last_h, last_c, grad_y.contiguous(), grad_h, grad_c, reverse,
        _LSTM, h.shape[1], 1, True, True, False, [], False, workspace,
    )  # fmt: skip
    return result


def _plain(tensors: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The layer by torch.lstm, time turned around for the reverse direction."""
    x, w_ih, w_hh, b_ih, b_hh, h, c = tensors
    sequence = x.flip(0) if reverse else x
    y, last_h, last_c = torch.lstm(
        sequence, (h.unsqueeze(0), c.unsqueeze(0)), (w_ih, w_hh, b_ih, b_hh), True, 1, 0.0, True, False, False
    )
    return (y.flip(0) if reverse else y), last_h.squeeze(0), last_c.squeeze(0)


def _through_time(
    grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    h: Tensor, c: Tensor, reverse: bool,
) -> Sequence[Tensor]:  # fmt: skip
    """Back-propagation through time, written out; the gates are computed again on the way forward."""
    times = range(x.shape[0] - 1, -1, -1) if reverse else range(x.shape[0])
    projected = x @ w_ih.t() + b_ih + b_hh
    kept: dict[int, tuple[Tensor, ...]] = {}
    for t in times:
        i, f, g, o = (projected[t] + h @ w_hh.t()).chunk(4, dim=1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new_c = f * c + i * g
        kept[t] = (i, f, g, o, c, new_c.tanh(), h)
        h, c = o * new_c.tanh(), new_c
    grad_gates = torch.empty_like(projected)
    grad_w_hh = torch.zeros_like(w_hh)
    for t in reversed(times):
        i, f, g, o, old_c, squashed, old_h = kept[t]
        total_h = grad_y[t] + grad_h
        total_c = grad_c + total_h * o * (1 - squashed**2)
        parts = (
            total_c * g * i * (1 - i),
            total_c * old_c * f * (1 - f),
            total_c * i * (1 - g**2),
            total_h * squashed * o * (1 - o),
        )
        grad_gates[t] = torch.cat(parts, dim=1)
        grad_w_hh += grad_gates[t].t() @ old_h
        grad_h, grad_c = grad_gates[t] @ w_hh, total_c * f
    grad_bias = grad_gates.sum((0, 1))
    grad_w_ih = grad_gates.flatten(0, 1).t() @ x.flatten(0, 1)
    return grad_gates @ w_ih, grad_w_ih, grad_w_hh, grad_bias, grad_bias.clone(), grad_h, grad_c


def stacked_lstm(
    x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *options: Any
) -> tuple[Tensor, ...]:
    """What `torch.lstm` computes, layer by layer."""

    def run(
        sequence: Tensor, own: Sequence[Tensor], states: Sequence[Tensor], reverse: bool
    ) -> Sequence[Tensor]:
        return lstm_layer(sequence, *own, *states, reverse)[:3]  # type: ignore[no-any-return]

    return stacked(run, x, states, weights, *options)


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.lstm_layer.default: run_lstm_layer,
        torch.ops.plait.lstm_layer_backward.default: run_lstm_layer_backward,
    }
)
