"""What ops give on fake tensors, each asked of torch once.

In: an op and its arguments, nodes among them. Out: its fake value. Ranks and plans ask for the same ops on tensors of
the same shapes again and again, and torch takes longer to say what comes out than localizing does for all the rest.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from plait.torch_private.fake import FakeTensor


class Fakes:
    """Fake values of ops under the mode of one graph; `known` is kept with the graph."""

    def __init__(self, mode: Any, known: dict[Hashable, Any]) -> None:
        self._mode = mode
        self._known = known
        self._told: dict[fx.Node, Hashable] = {}

    def of(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of an op; one that was found before where target and arguments are the same."""
        try:
            key = (target, self._tell(args), self._tell(kwargs))
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument that cannot be compared by value
            return self._run(target, args, kwargs)
        value = self._known[key] = self._run(target, args, kwargs)
        return value

    def _run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        with self._mode, torch.no_grad():
            return target(*fake_args, **fake_kwargs)

    def _tell(self, value: Any) -> Hashable:
        """All that an op can see of an argument."""
        if isinstance(value, fx.Node):
            if value not in self._told:
                self._told[value] = self._tell(value.meta["val"])
            return self._told[value]
        if isinstance(value, torch.Tensor):
            if not isinstance(value, FakeTensor) or value.constant is not None:
                raise TypeError("it has numbers, on which shapes may depend")
            return (
                *(value.shape, value.stride(), value.dtype, value.device, value.storage_offset()),
                *(value.untyped_storage().nbytes(), value.requires_grad),
            )
        if isinstance(value, (tuple, list)):
            return (type(value), *(self._tell(entry) for entry in value))
        if isinstance(value, dict):
            return tuple((name, self._tell(entry)) for name, entry in value.items())
        return (type(value), value)  # 1, 1.0 and True are one key otherwise
