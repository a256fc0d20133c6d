"""Torch's recurrent cells by their equations, where torch has no rule to batch them.

In: a module. Out: while active, the LSTM, GRU and RNN cells in it compute the same with plain operations.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _gates(cell: nn.RNNCellBase, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What the gates get from the input and from the state."""
    return F.linear(x, cell.weight_ih, cell.bias_ih), F.linear(hidden, cell.weight_hh, cell.bias_hh)


def _zeros(cell: nn.RNNCellBase, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], cell.hidden_size)


def _lstm(cell: nn.LSTMCell, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    hidden, kept = state if state is not None else (_zeros(cell, x), _zeros(cell, x))
    i, f, g, o = sum(_gates(cell, x, hidden)).chunk(4, -1)  # type: ignore[union-attr]
    kept = torch.sigmoid(f) * kept + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(kept), kept


def _gru(cell: nn.GRUCell, x: Tensor, hidden: Tensor | None = None) -> Tensor:
    hidden = _zeros(cell, x) if hidden is None else hidden
    (r, z, n), (s, y, m) = (part.chunk(3, -1) for part in _gates(cell, x, hidden))
    new = torch.tanh(n + torch.sigmoid(r + s) * m)
    return new + torch.sigmoid(z + y) * (hidden - new)


def _rnn(cell: nn.RNNCell, x: Tensor, hidden: Tensor | None = None) -> Tensor:
    own, seen = _gates(cell, x, _zeros(cell, x) if hidden is None else hidden)
    return torch.tanh(own + seen) if cell.nonlinearity == "tanh" else torch.relu(own + seen)


_EQUATIONS: Mapping[type[nn.Module], Callable[..., Any]] = MappingProxyType(
    {nn.LSTMCell: _lstm, nn.GRUCell: _gru, nn.RNNCell: _rnn}
)


@contextmanager
def plain_cells(module: nn.Module) -> Iterator[None]:
    """While active, torch's own cells in a module are plain operations."""
    found = [part for part in module.modules() if type(part) in _EQUATIONS and "forward" not in vars(part)]
    for part in found:
        part.forward = partial(_EQUATIONS[type(part)], part)
    try:
        yield
    finally:
        for part in found:
            del part.forward
