"""Layers of LSTM, GRU and plain recurrent cells as ops of ours, in the dtype in which torch computes them.

In: calls of torch's functions of whole layers. Out: what they give.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.graph.capture.autocast import cast_all
from plait.graph.ops.lstm import stacked_lstm
from plait.graph.ops.recurrent import suits_op
from plait.graph.ops.rnn import KINDS, stacked_rnn

_RECURRENT = (torch.lstm, *KINDS)


def is_recurrent_op(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call is captured as layers."""
    if func not in _RECURRENT or not suits_op(args):
        return False
    # Under autocast a GRU on processors keeps its state in float32, and multiplies in fewer bits.
    return func is not torch.gru or not torch.is_autocast_enabled("cpu")


def recurrent(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Such a call; under autocast all in its dtype, as oneDNN's layers are and products of plain cells."""
    args = cast_all(args)
    with torch.autocast("cpu", enabled=False):
        return stacked_lstm(*args) if func is torch.lstm else stacked_rnn(KINDS[func], *args)
