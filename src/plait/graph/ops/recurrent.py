"""What layers of LSTM, GRU and plain recurrent cells have in common: how they are stacked, and cuDNN's calls.

In: a layer of one direction, sequences and weights. Out: what torch's functions of several layers compute.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.torch_private.ops import cudnn_rnn, cudnn_rnn_backward

_ALIGNED = 256
"""Bytes: where memory for cuDNN may begin."""

Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], bool], Sequence[Tensor]]
"""(sequence [time, samples, features], the four weights, first states, reverse) -> (outputs, *last states)."""


def stacked(
    run: Layer, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` compute, layer by layer."""
    sequence = x.transpose(0, 1) if batch_first else x
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    last = [list[Tensor]() for _ in states]
    for layer in range(num_layers):
        if layer > 0 and dropout > 0 and train:
            sequence = torch.nn.functional.dropout(sequence, dropout)
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = list(weights[each * number : each * (number + 1)])
            if not has_biases:
                own += [own[0].new_zeros(own[0].shape[0])] * 2
            y, *ends = run(sequence, own, [state[number] for state in states], direction == 1)
            outputs.append(y)
            for ended, end in zip(last, ends, strict=True):
                ended.append(end)
        sequence = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
    result = sequence.transpose(0, 1) if batch_first else sequence
    return result, *(torch.stack(ended) for ended in last)


def suits_op(args: Sequence[Any]) -> bool:
    """Without projections, on sequences of one length (not packed)."""
    if len(args) != 9 or not isinstance(args[3], bool):  # packed: lengths come second, and all else later
        return False
    x, _, weights, has_biases, layers, _, _, bidirectional, _ = args
    plain = len(weights) == (4 if has_biases else 2) * layers * (2 if bidirectional else 1)
    return bool(plain and x.ndim == 3)


def by_autograd(
    function: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor], grads: Any
) -> tuple[Tensor, ...]:
    """Gradients of a layer that is run again.

    Generated code calls this function itself: in the dispatcher autograd is off.
    """
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        again = function(leaves)
    return torch.autograd.grad(again, leaves, grads)


def is_cudnn(x: Tensor) -> bool:
    """Whether cuDNN runs it."""
    return x.is_cuda and bool(torch.backends.cudnn.is_acceptable(x))  # type: ignore[no-untyped-call]


def by_cudnn(
    x: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor | None, reverse: bool, kind: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(outputs, last h, last c, workspace): cuDNN's reserve and its own copy of the weights are for the backward.

    `kind`: cuDNN's number of the cell.
    """
    sequence = x.flip(0) if reverse else x.contiguous()
    y, last_h, last_c, reserve, flat = cudnn_rnn(
        sequence, list(weights), 4, None, _one(h), None if c is None else _one(c), *_options(h, kind), None
    )
    gap = reserve.new_empty(-reserve.numel() % _ALIGNED)
    workspace = torch.cat((reserve, gap, flat.view(torch.uint8)))
    return (y.flip(0) if reverse else y), last_h[0], last_c if c is None else last_c[0], workspace


def back_by_cudnn(
    grads: tuple[Tensor, Tensor, Tensor | None], x: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor | None,
    y: Tensor, workspace: Tensor, reverse: bool, kind: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the input, the four weights and the first states."""
    sequence, outputs, grad_y = (t.flip(0) if reverse else t.contiguous() for t in (x, y, grads[0]))
    size = sum(weight.numel() for weight in weights) * x.element_size()
    reserve, flat = workspace[:-size], workspace[-size:].view(x.dtype)
    grad_c = None if grads[2] is None else _one(grads[2])
    grad_x, grad_h, grad_c, grad_weights = cudnn_rnn_backward(
        sequence, list(weights), 4, flat, _one(h), None if c is None else _one(c), outputs, grad_y, _one(grads[1]),
        grad_c, *_options(h, kind), None, reserve, [c is None or place != 2 for place in range(4)],
    )  # fmt: skip
    first = (grad_h[0],) if c is None else (grad_h[0], grad_c[0])
    return (grad_x.flip(0) if reverse else grad_x), *grad_weights, *first


def _one(state: Tensor) -> Tensor:
    """The state of one layer, as cuDNN's wrappers take it."""
    return state[None].contiguous()


def _options(h: Tensor, kind: int) -> tuple[Any, ...]:
    """Kind, width, projection, layers, order of dims, dropout, training, directions, lengths."""
    return kind, h.shape[1], 0, 1, False, 0.0, True, False, []
