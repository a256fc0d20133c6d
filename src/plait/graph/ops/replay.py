"""Let eager code draw the numbers of a captured graph.

In: the nodes of a graph and the key of a micro-step. Out: takers under which the k-th random op of the user's code
returns what the graph's k-th random op returns, so that both can be compared with dropout on. Where the two do not
match, it says so.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from plait.graph.ops.draws import Drawn, drawn, draws_nothing
from plait.graph.ops.random import IMPLEMENTATIONS
from plait.torch_private.intercept import Takers, drawing_ops
from plait.torch_private.ops import OpOverload

_ALIKE = 1e-9
"""By how much two probabilities may differ that are 1 - p, once of Python's numbers and once of torch's."""


class NotReplayableError(Exception):
    """The user's code draws numbers in another way than its graph."""


class OtherChanceError(NotReplayableError):
    """Nothing in the graph is drawn with the probability that the user's code has."""

    def __init__(self, own: float, graphs: float) -> None:
        super().__init__(f"numbers that the code draws with probability {own:g} are drawn with {graphs:g}")
        self.own, self.graphs = own, graphs


class Replay:
    """Takes random ops of eager code, and gives them the numbers of the graph."""

    def __init__(
        self, nodes: Iterable[fx.Node], key: Tensor, seen: Callable[[Drawn], None] | None = None
    ) -> None:
        """`seen` is told of every draw."""
        self._nodes: dict[int, list[fx.Node]] = {}
        """By number; of a step that branches, those of every outcome."""
        for node in nodes:
            if node.target in IMPLEMENTATIONS:
                self._nodes.setdefault(node.args[1], []).append(node)  # type: ignore[arg-type]
        self._key, self._seen = key, seen
        self._last: fx.Node | None = None
        self._next = 0
        self._passed = 0
        """Draws that nothing in the graph depends on."""

    def takers(self) -> Takers:
        """For `intercepted`; none where the graph draws no numbers."""
        return ((drawing_ops(), self._take),) if self._nodes else ()

    def finish(self) -> None:
        """The code has ended; raises where it drew less than its graph: what was passed by was needed."""
        if self._passed and self._next <= max(self._nodes):
            raise NotReplayableError

    def _take(self, op: OpOverload, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        if draws_nothing(given):
            return call()
        if self._next not in self._nodes and self._next < max(self._nodes):
            self._next, self._passed = self._next + 1, self._passed + 1
            return call()  # nothing in the graph depends on it
        made = drawn(op, given, self._numbers)
        if made is None:
            return call()
        if self._seen is not None and (node := self._last) is not None:
            number, shape, dtype = cast(tuple[int, list[int], torch.dtype], node.args[1:4])
            self._seen(
                Drawn(
                    op=op, given=given, number=number, shape=tuple(shape), dtype=dtype, placement=node.kwargs,
                    place=self._next,
                )
            )  # fmt: skip
        return made

    def _numbers(self, target: Any, like: Tensor, dtype: torch.dtype, *parameters: Any) -> Tensor:
        """In the dtype of the graph's draw, which decides how fine they are."""
        found = self._nodes.get(self._next, [])
        self._next += 1
        suited = [node for node in found if _suits(node, target, like, parameters)]
        if not suited and (other := _other_chance(self._nodes, found, target, like, parameters)) is not None:
            raise OtherChanceError(parameters[0], other)
        if not suited or any(node.args[2:] != suited[0].args[2:] for node in suited):
            raise NotReplayableError
        self._last = node = suited[0]
        return IMPLEMENTATIONS[target](self._key, *node.args[1:4], *parameters, **node.kwargs)


def _suits(node: fx.Node, target: Any, like: Tensor, parameters: tuple[Any, ...]) -> bool:
    """Whether a draw of the code's may be this one of the graph's."""
    if node.target is not target or list(node.args[2]) != list(like.shape):  # type: ignore[arg-type]
        return False
    chances = target is not torch.ops.plait.bernoulli.default or not isinstance(node.args[4], float)
    return chances or abs(parameters[0] - node.args[4]) < _ALIKE


def _other_chance(
    nodes: Mapping[int, list[fx.Node]],
    turn: list[fx.Node],
    target: Any,
    like: Tensor,
    parameters: tuple[Any, ...],
) -> float | None:
    """The probability of the draw whose turn it is, where it is like the code's in all else, and no draw of the graph
    has the code's."""
    if target is not torch.ops.plait.bernoulli.default:
        return None
    if any(_suits(node, target, like, parameters) for found in nodes.values() for node in found):
        return None
    for node in turn:
        if isinstance(chance := node.args[4], float) and _suits(node, target, like, (chance,)):
            return chance
    return None
