"""Modules of torch that are one operation for a recording, where their parts would be several.

In: a model. Out: while active, calls of its linear layers, embeddings and cells are written down whole: torch takes
more time to hand the functions in them over than they take to be written down.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from plait.dynamic.lazy import flat
from plait.dynamic.recording import Recording
from plait.torch_private.dispatch import unheard

_PURE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
"""Whose results depend on what they are called with and on parameters alone."""


class _Leaf:
    """A module as a function of values and parameters."""

    def __init__(self, module: nn.Module, recording: Recording) -> None:
        self.module = module
        self.__name__ = type(module).__name__
        self.names = {
            own: recording.names[id(value)] for own, value in module.named_parameters(recurse=False)
        }

    def __call__(self, *values: Any, parameters: Mapping[str, Tensor]) -> Any:
        given = {own: parameters[name] for own, name in self.names.items()}
        return functional_call(self.module, given, values)


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
    plain, leaf = part.forward, recording.signatures.leaves.setdefault(part, _Leaf(part, recording))

    def forward(*arguments: Any, **keywords: Any) -> Any:
        values = not keywords and all(each is None or isinstance(each, Tensor) for each in flat(arguments))
        if recording.is_paused or not values:
            return plain(*arguments, **keywords)
        with unheard():
            return recording.record(leaf, arguments, {}, 4, leaf.names.values())

    return forward
