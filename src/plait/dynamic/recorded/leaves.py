"""Modules of torch that are one operation for a recording, where their parts would be several.

In: a model. Out: while active, calls of its linear layers, embeddings and cells are written down whole: torch takes
more time to hand the functions in them over than they take to be written down.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from plait.dynamic.recorded.lazy import Lazy, flat
from plait.dynamic.recorded.recording import Leaf, Recording
from plait.torch_private.dispatch import unheard

_PURE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
"""Whose results depend on what they are called with and on parameters alone."""
_DEPTH = 4
"""How far up the code is that calls a module: over its forward and torch's two calls around it."""


@contextmanager
def whole_leaves(model: nn.Module, recording: Recording) -> Iterator[None]:
    """While active, calls of such modules are recorded whole."""
    found = [part for part in model.modules() if type(part) in _PURE and _is_plain(part, recording)]
    for part in found:
        part.forward = _recorded(part, recording)
    try:
        yield
    finally:
        for part in found:
            del part.forward


def _is_plain(part: nn.Module, recording: Recording) -> bool:
    known = all(id(value) in recording.names for value in part.parameters(recurse=False))
    return known and "forward" not in vars(part) and getattr(part, "max_norm", None) is None


def _recorded(part: nn.Module, recording: Recording) -> Any:
    names = {own: recording.names[id(value)] for own, value in part.named_parameters(recurse=False)}
    plain, leaf = part.forward, recording.signatures.leaves.setdefault(part, Leaf(part, names))

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if recording.is_paused or keywords:
            return plain(*arguments, **keywords)
        if len(arguments) == 1 and type(arguments[0]) is Lazy:
            return arguments[0]._recorded(leaf, _DEPTH)
        if not all(each is None or isinstance(each, Tensor) for each in flat(arguments)):
            return plain(*arguments)
        with unheard():
            return recording.record(leaf, arguments, {}, _DEPTH)

    return forward
