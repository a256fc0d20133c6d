"""How each random op of torch is made of plait's, whoever asks: one rule an op.

In: an op of torch and its arguments by name. Out: the same distribution, from ops whose numbers belong to samples (see
`random.py`). A rule is written once, over a `Draw`: in a graph that adds nodes (`graph/rewrite/random_ops.py`), beside
eager code it computes (`run/eager/draws.py`, and `replay.py`, which takes the numbers of a graph). It never decides
which numbers these are.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.graph.ops import random as random_ops
from plait.torch_private.ops import OpOverload, schema_of

aten = torch.ops.aten


class Draw(ABC):
    """One random op, about to be replaced. Values are tensors, or nodes of a graph."""

    def __init__(self, like: Tensor) -> None:
        """`like`: a tensor of the shape and dtype of the op's (first) result."""
        self.like = like

    @abstractmethod
    def random(self, target: Any, like: Tensor, dtype: torch.dtype, *parameters: Any) -> Any:
        """Numbers of an op of ours in the shape of `like`."""

    @abstractmethod
    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What an ordinary op returns."""

    @abstractmethod
    def tensor(self, value: Any) -> Tensor | None:
        """What a value is like; None: it is a number."""

    def uniform(self, like: Tensor) -> Any:
        """In [0, 1), in a dtype that has enough of it."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        return self.random(torch.ops.plait.uniform.default, like, wide, 0.0, 1.0)

    def clocks(self, like: Tensor) -> Any:
        """Exponential numbers of rate 1."""
        kept = self.call(aten.clamp_min.default, self.uniform(like), random_ops.SMALLEST)
        return self.call(aten.neg.default, self.call(aten.log.default, kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A random op of eager code, and what its numbers were taken from: enough to draw it again, under any key."""

    op: OpOverload
    given: Mapping[str, Any]
    """Its arguments by name."""
    number: int
    """Which draw of ours."""
    shape: tuple[int, ...]
    """Of the numbers."""
    dtype: torch.dtype
    """In which they were drawn."""
    placement: Mapping[str, Any]
    """Where samples are in them."""
    place: Any
    """In the stream of numbers: code that sets torch's generator back comes to a place again, on purpose."""

    def again(self, key: Tensor, given: Mapping[str, Any]) -> Any:
        """What the op returns under another key."""

        def numbers(target: Any, like: Tensor, dtype: torch.dtype, *parameters: Any) -> Tensor:
            made = random_ops.IMPLEMENTATIONS[target]
            return made(key, self.number, list(like.shape), self.dtype, *parameters, **self.placement)

        return drawn(self.op, given, numbers)


DrawRule = Callable[[Draw, Mapping[str, Any]], Any]
"""(a draw, the op's arguments) -> its result, up to the dtype; None: not this form of it, and nothing was drawn."""


class EagerDraw(Draw):
    """One random op of code that runs."""

    def __init__(self, like: Tensor, numbers: Callable[..., Tensor]) -> None:
        """`numbers`: as `Draw.random`."""
        super().__init__(like)
        self._numbers = numbers

    def random(self, target: Any, like: Tensor, dtype: torch.dtype, *parameters: Any) -> Tensor:
        return self._numbers(target, like, dtype, *parameters)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def tensor(self, value: Any) -> Tensor | None:
        return value if isinstance(value, Tensor) else None


def drawn(op: OpOverload, given: Mapping[str, Any], numbers: Callable[..., Tensor]) -> Any:
    """The result of a random op of eager code, written where it is to be; None: there is no rule for this form."""
    name, outs = schema_of(op).name, [entry.name for entry in schema_of(op).arguments if entry.is_out]
    rule = RULES.get(name.removesuffix("_"))
    if rule is None or outs not in ([], ["out"]):
        return None
    like = _like(given, torch.int64 if "randint" in name else torch.get_default_dtype())
    made = rule(EagerDraw(like, numbers), given)
    if made is None or isinstance(made, tuple):
        return made
    if outs:
        return given["out"].resize_(made.shape).copy_(made)
    return given["self"].copy_(made) if name.endswith("_") else made


def draws_nothing(given: Mapping[str, Any]) -> bool:
    """Whether a call of a random op leaves the generator alone: attention without dropout, evaluation."""
    off = any(given.get(name) is False for name in ("train", "training"))
    return off or any(given.get(name, 1.0) == 0.0 for name in ("dropout_p", "dropout"))


def _like(given: Mapping[str, Any], default: torch.dtype) -> Tensor:
    """A tensor of the shape and dtype of the result."""
    tensors = [
        given[name] for name in ("self", "input", "mean", "std") if isinstance(given.get(name), Tensor)
    ]
    dtype = given.get("dtype")
    asked = dtype if isinstance(dtype, torch.dtype) else None  # randint's schema has a number as its default
    if tensors:
        like: Tensor = tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]
        return like if asked is None else torch.empty_like(like, dtype=asked)
    return torch.empty(given["size"], dtype=asked or default, device=given.get("device") or "cpu")


def _as_asked(draw: Draw, made: Any) -> Any:
    """A result in the dtype of the op's."""
    found = draw.tensor(made)
    assert found is not None
    return (
        made
        if found.dtype == draw.like.dtype
        else draw.call(aten._to_copy.default, made, dtype=draw.like.dtype)
    )


def _bernoulli(draw: Draw, given: Mapping[str, Any]) -> Any:
    p = given.get("p", given["self"])
    if draw.tensor(p) is None:
        return _as_asked(
            draw, draw.random(torch.ops.plait.bernoulli.default, draw.like, draw.like.dtype, float(p))
        )
    return _as_asked(draw, draw.call(aten.lt.Tensor, draw.uniform(draw.like), p))


def _uniform(draw: Draw, given: Mapping[str, Any]) -> Any:
    if not draw.like.is_floating_point():
        return None
    low, high = float(given.get("from", 0.0)), float(given.get("to", 1.0))
    return _as_asked(
        draw, draw.random(torch.ops.plait.uniform.default, draw.like, draw.like.dtype, low, high)
    )


def _normal(draw: Draw, given: Mapping[str, Any]) -> Any:
    if not draw.like.is_floating_point():
        return None
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    target, dtype = torch.ops.plait.normal.default, draw.like.dtype
    if draw.tensor(mean) is None and draw.tensor(std) is None:
        return _as_asked(draw, draw.random(target, draw.like, dtype, float(mean), float(std)))
    numbers = draw.random(target, draw.like, dtype, 0.0, 1.0)
    return _as_asked(draw, draw.call(aten.add.Tensor, draw.call(aten.mul.Tensor, numbers, std), mean))


def _randint(draw: Draw, given: Mapping[str, Any]) -> Any:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    if not (isinstance(low, int) and isinstance(high, int) and high - low <= random_ops.RANGE_LIMIT):
        return None
    return _as_asked(
        draw, draw.random(torch.ops.plait.randint.default, draw.like, draw.like.dtype, low, high)
    )


def _native_dropout(draw: Draw, given: Mapping[str, Any]) -> Any:
    """(input, p) -> (input * mask / (1 - p), mask)."""
    keep = 1.0 - float(given["p"])
    mask = draw.random(torch.ops.plait.bernoulli.default, draw.like, torch.bool, keep)
    kept = draw.call(aten.mul.Tensor, given["input"], mask)
    return draw.call(aten.mul.Tensor, kept, 1.0 / keep if keep > 0.0 else 0.0), mask


def _exponential(draw: Draw, given: Mapping[str, Any]) -> Any:
    if not draw.like.is_floating_point():
        return None
    return _as_asked(draw, draw.call(aten.div.Tensor, draw.clocks(draw.like), float(given.get("lambd", 1.0))))


def _multinomial(draw: Draw, given: Mapping[str, Any]) -> Any:
    """Without replacement: the first of exponential clocks that run at these rates."""
    rates, count = given["self"], given["num_samples"]
    like = draw.tensor(rates)
    if like is None or (given.get("replacement") and count > 1):
        return None
    order = draw.call(aten.div.Tensor, rates, draw.clocks(like))
    return draw.call(operator.getitem, draw.call(aten.topk.default, order, count, -1), 1)


RULES: Mapping[str, DrawRule] = MappingProxyType(
    {
        "aten::bernoulli": _bernoulli,
        "aten::rand": _uniform,
        "aten::rand_like": _uniform,
        "aten::uniform": _uniform,
        "aten::randn": _normal,
        "aten::randn_like": _normal,
        "aten::normal": _normal,
        "aten::normal_functional": _normal,
        "aten::randint": _randint,
        "aten::randint_like": _randint,
        "aten::random": _randint,
        "aten::native_dropout": _native_dropout,
        "aten::exponential": _exponential,
        "aten::multinomial": _multinomial,
    }
)
"""By the name in an op's schema, in place or not."""
