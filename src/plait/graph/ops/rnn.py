"""One direction of one GRU layer, or of a plain recurrent one, as an op that plans can partition, as `lstm` is.

In: a sequence [time, samples, features], weights, the first state. Out: the outputs, the last state, and what the
backward needs. On CUDA it runs cuDNN's layer; elsewhere a loop over time, as eager torch does. Only the gradient of
the state goes back from time to time; all else is computed at once, from states and, of a GRU, its gates.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.graph.ops.recurrent import back_by_cudnn, by_autograd, by_cudnn, is_cudnn, stacked

RELU, TANH, GRU = 0, 1, 3
"""cuDNN's numbers of the kinds of cells."""
_TORCHS: Mapping[int, Callable[..., tuple[Tensor, Tensor]]] = MappingProxyType(
    {RELU: torch.rnn_relu, TANH: torch.rnn_tanh, GRU: torch.gru}
)
KINDS: Mapping[Any, int] = MappingProxyType({function: kind for kind, function in _TORCHS.items()})
"""Of torch's functions."""

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("plait::rnn_layer", mutates_args=())
def rnn_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, kind: int, reverse: bool
) -> Four:
    """(outputs [time, samples, width], last h, gates [time, samples, ...], what cuDNN keeps)."""
    return run_rnn_layer(x, w_ih, w_hh, b_ih, b_hh, h, kind, reverse)


@rnn_layer.register_fake
def _(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, kind: int, reverse: bool
) -> Four:
    outputs = x.new_empty(x.shape[0], x.shape[1], h.shape[1])
    gates = x.new_empty(*x.shape[:2], _kept_width(x, h, kind))
    return outputs, h.new_empty(h.shape), gates, x.new_empty(0, dtype=torch.uint8)


@torch.library.custom_op("plait::rnn_layer_backward", mutates_args=())
def rnn_layer_backward(
    grad_y: Tensor, grad_h: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor,
    y: Tensor, gates: Tensor, workspace: Tensor, kind: int, reverse: bool,
) -> Six:  # fmt: skip
    """Gradients of the input, the four weights and the first state, each in one piece: who compiles relies on it."""
    return run_rnn_layer_backward(
        grad_y, grad_h, x, w_ih, w_hh, b_ih, b_hh, h, y, gates, workspace, kind, reverse
    )


@rnn_layer_backward.register_fake
def _(
    grad_y: Tensor, grad_h: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor,
    y: Tensor, gates: Tensor, workspace: Tensor, kind: int, reverse: bool,
) -> Six:  # fmt: skip
    tensors = (x, w_ih, w_hh, b_ih, b_hh, h)
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)  # type: ignore[return-value]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
    *tensors, ctx.kind, ctx.reverse = inputs
    ctx.save_for_backward(*tensors, output[0], *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx: Any, grad_y: Tensor, grad_h: Tensor, *_: Any) -> tuple[Any, ...]:
    return (*rnn_layer_backward(grad_y, grad_h, *ctx.saved_tensors, ctx.kind, ctx.reverse), None, None)


rnn_layer.register_autograd(_differentiate, setup_context=_remember)


def run_rnn_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, kind: int, reverse: bool
) -> Four:
    """The op on real tensors."""
    nothing = x.new_empty(0, dtype=torch.uint8)
    if x.numel() == 0:
        return (
            x.new_zeros(x.shape[0], x.shape[1], h.shape[1]),
            h.clone(memory_format=torch.contiguous_format),
            x.new_empty(*x.shape[:2], _kept_width(x, h, kind)),
            nothing,
        )
    weights = (w_ih, w_hh, b_ih, b_hh)
    if _kept_width(x, h, kind):
        return *_gru_layer(x, *weights, h, reverse), nothing
    no_gates = x.new_empty(*x.shape[:2], 0)
    if is_cudnn(x):
        y, last, _, workspace = by_cudnn(x, weights, h, None, reverse, kind)
        return y, last, no_gates, workspace
    return *_plain((x, *weights, h), kind, reverse), no_gates, nothing


def _kept_width(x: Tensor, h: Tensor, kind: int) -> int:
    """How many numbers of every time and sample the backward wants of the gates."""
    return 4 * h.shape[1] if kind == GRU and x.device.type == "cpu" else 0


def run_rnn_layer_backward(
    grad_y: Tensor, grad_h: Tensor, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor,
    y: Tensor, gates: Tensor, workspace: Tensor, kind: int, reverse: bool,
) -> Six:  # fmt: skip
    """The gradient on real tensors."""
    found = _gradients(grad_y, grad_h, (x, w_ih, w_hh, b_ih, b_hh, h), y, gates, workspace, kind, reverse)
    return tuple(gradient.contiguous() for gradient in found)  # type: ignore[return-value]


def _gradients(
    grad_y: Tensor, grad_h: Tensor, tensors: Sequence[Tensor], y: Tensor, gates: Tensor, workspace: Tensor, kind: int,
    reverse: bool,
) -> Sequence[Tensor]:  # fmt: skip
    x, w_ih, w_hh, _, _, h = tensors
    if x.numel() == 0:
        return [torch.zeros_like(tensor) for tensor in tensors]
    if is_cudnn(x):
        grads = (grad_y, grad_h, None)
        return back_by_cudnn(grads, x, tensors[1:5], h, None, y, workspace, reverse, kind)
    if x.device.type == "cuda":
        return by_autograd(lambda leaves: _plain(leaves, kind, reverse), tensors, (grad_y, grad_h))
    before = torch.cat((y[1:], h[None]) if reverse else (h[None], y[:-1]))
    slopes, kept = _gru_slopes(before, gates) if kind == GRU else (_slope(y, kind)[:, :, None], None)
    changes = torch.empty_like(slopes)
    num_sums = w_hh.shape[0] // w_hh.shape[1]
    for t in range(x.shape[0]) if reverse else range(x.shape[0] - 1, -1, -1):
        total = grad_y[t] + grad_h
        torch.mul(slopes[t], total[:, None], out=changes[t])
        grad_h = changes[t, :, :num_sums].flatten(1) @ w_hh
        if kept is not None:
            grad_h = torch.addcmul(grad_h, total, kept[t])
    inner = changes[:, :, :num_sums].flatten(2)
    outer = inner if kept is None else changes[:, :, [0, 1, 3]].flatten(2)
    return (
        outer @ w_ih,
        outer.flatten(0, 1).t() @ x.flatten(0, 1),
        inner.flatten(0, 1).t() @ before.flatten(0, 1),
        outer.sum((0, 1)),
        inner.sum((0, 1)),
        grad_h,
    )


def _slope(y: Tensor, kind: int) -> Tensor:
    """Of the squashing, by what it gave."""
    return 1 - y**2 if kind == TANH else (y > 0).to(y.dtype)


def _gru_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A GRU layer; of every time are kept its two gates, the new state, and what the old one gives to that."""
    width, sums = h.shape[1], F.linear(x, w_ih, b_ih)
    kept = x.new_empty(*x.shape[:2], 4 * width)
    y = x.new_empty(*x.shape[:2], width)
    for t in range(x.shape[0] - 1, -1, -1) if reverse else range(x.shape[0]):
        given = torch.addmm(b_hh, h, w_hh.t())
        gates, new, inner = kept[t, :, : 2 * width], kept[t, :, 2 * width : -width], kept[t, :, -width:]
        torch.sigmoid(sums[t, :, : 2 * width] + given[:, : 2 * width], out=gates)
        inner.copy_(given[:, 2 * width :])
        torch.tanh(torch.addcmul(sums[t, :, 2 * width :], gates[:, :width], inner), out=new)
        h = torch.addcmul(new, gates[:, width:], h - new, out=y[t])
    return y, h.clone(), kept


def _gru_slopes(before: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """By how much new states grow with the sums of their gates, [time, samples, 4, width], and with the old states.

    The sums: of the reset gate, of the update gate, what the state gives to the new one, what the input gives to it.
    """
    r, z, new, inner = gates.chunk(4, dim=2)
    slope = (1 - z) * (1 - new**2)
    slopes = (slope * inner * r * (1 - r), (before - new) * z * (1 - z), slope * r, slope)
    return torch.stack(slopes, dim=2), z


def _plain(tensors: Sequence[Tensor], kind: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """The layer by torch's function, time turned around for the reverse direction."""
    x, *weights, h = tensors
    sequence = x.flip(0) if reverse else x
    y, last = _TORCHS[kind](sequence, h.unsqueeze(0), weights, True, 1, 0.0, True, False, False)
    return (y.flip(0) if reverse else y), last.squeeze(0)


def stacked_rnn(
    kind: int, x: Tensor, h: Tensor, weights: Sequence[Tensor], *options: Any
) -> tuple[Tensor, ...]:
    """What `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` compute, layer by layer."""

    def run(
        sequence: Tensor, own: Sequence[Tensor], states: Sequence[Tensor], reverse: bool
    ) -> Sequence[Tensor]:
        return rnn_layer(sequence, *own, *states, kind, reverse)[:2]  # type: ignore[no-any-return]

    return stacked(run, x, (h,), weights, *options)


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.rnn_layer.default: run_rnn_layer,
        torch.ops.plait.rnn_layer_backward.default: run_rnn_layer_backward,
    }
)
