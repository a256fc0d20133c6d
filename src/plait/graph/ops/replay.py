"""Let eager code draw the numbers of a captured graph.

In: the nodes of a graph and the key of a micro-step. Out: a mode under which the k-th random op of the user's code
returns what the graph's k-th random op returns, so that both can be compared with dropout on. Where the two do not
match, it says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.ops import random as random_ops
from plait.torch_private.dispatch import TorchDispatchMode
from plait.torch_private.ops import schema_of

_IN_PLACE = ("aten::bernoulli_", "aten::uniform_", "aten::normal_", "aten::random_", "aten::exponential_")
_NEW = ("aten::bernoulli", "aten::rand", "aten::rand_like", "aten::randn", "aten::randn_like", "aten::normal",
        "aten::randint", "aten::randint_like", "aten::multinomial")  # fmt: skip


class NotReplayableError(Exception):
    """The user's code draws numbers in another way than its graph."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, random ops of eager code return the numbers of the graph."""

    def __init__(self, nodes: Iterable[fx.Node], key: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nodes: dict[int, list[fx.Node]] = {}
        """By number; of a step that branches, those of every outcome."""
        for node in nodes:
            if node.target in random_ops.IMPLEMENTATIONS:
                self._nodes.setdefault(node.args[1], []).append(node)  # type: ignore[arg-type]
        self._key = key
        self._next = 0

    @property
    def any(self) -> bool:
        """Whether the graph draws numbers at all."""
        return bool(self._nodes)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = schema_of(func).name
        if name not in _IN_PLACE and name not in _NEW:
            return func(*args, **(kwargs or {}))
        drawn = name in _IN_PLACE or name == "aten::multinomial"
        like = args[0] if drawn else func(*args, **(kwargs or {}))
        value = self._draw(like, name, (*args, *(kwargs or {}).values()))
        return like.copy_(value) if name in _IN_PLACE else value

    def _draw(self, like: Tensor, name: str, args: Sequence[Any]) -> Tensor:
        found = self._nodes.get(self._next, [])
        self._next += 1
        if not found and self._next <= max(self._nodes, default=-1):
            return like  # nothing in the graph depends on it
        suited = [node for node in found if _suits(node, like, name, args)]
        if not suited or any(node.args[2:] != suited[0].args[2:] for node in suited):
            raise NotReplayableError
        node = suited[0]
        value = random_ops.IMPLEMENTATIONS[node.target](self._key, *node.args[1:], **node.kwargs)
        target = node.target
        if "bernoulli" in name and target is torch.ops.plait.uniform.default:
            value = value < (args[1] if name.endswith("_") else args[0])
        elif name == "aten::normal" and any(isinstance(entry, Tensor) for entry in args[:2]):
            mean, std = (*args[:2], 1.0)[:2]
            value = value * std + mean
        elif name in ("aten::exponential_", "aten::multinomial"):
            clocks = random_ops.clocks(value)
            if name == "aten::multinomial":
                rates: Tensor = args[0]
                return (rates / clocks).topk(args[1], dim=-1).indices
            value = clocks / (args[1] if len(args) > 1 else 1.0)
        return value.to(like.dtype)


def _suits(node: fx.Node, like: Tensor, name: str, args: Sequence[Any]) -> bool:
    """Whether a draw of the code's may be this one of the graph's."""
    given = args[1] if name == "aten::bernoulli_" and len(args) > 1 else None
    chance = node.args[4] if node.target is torch.ops.plait.bernoulli.default else None
    same = not isinstance(given, float) or not isinstance(chance, float) or abs(given - chance) < 1e-9
    return list(node.args[2]) == list(like.shape) and same  # type: ignore[arg-type]
