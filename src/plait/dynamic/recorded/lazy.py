"""A tensor of one sample whose numbers are not there yet.

In: what is done with it. Out: the same, written down by whoever records it. Its shape is known, its numbers only once
the code asks for one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import _getframe
from typing import Any, Protocol

from torch import Tensor

from plait.dynamic.recorded.signatures import CannotBatchError, Signatures, Token


class Records(Protocol):
    """Who writes down what is done with values."""

    signatures: Signatures
    tokens: dict[Any, Token]
    kinds: list[int]
    taken: list[int]
    num_values: int

    def record(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        depth: int = 2,
    ) -> Any:
        """Write an operation down; its results are `Lazy`. `depth`: how far up the code is that calls it."""

    def change(self, lazy: "Lazy", function: Callable[..., Any], arguments: Any, keywords: Any) -> "Lazy":
        """The same in place."""
        ...

    def number_of(self, value: "Lazy") -> Tensor:
        """What a value is, computed now."""
        ...


class Lazy:
    """A tensor of one sample whose numbers are not there yet. Behaves as a tensor does."""

    __slots__ = ("_code", "_number", "_recording")

    def __init__(self, recording: Records, number: int, code: int) -> None:
        self._recording = recording
        self._number = number
        self._code = code

    def _recorded(self, function: Callable[..., Any], depth: int) -> Any:
        """Write an operation of this value alone down: what `record` does of anything, quickly."""
        recording, frame = self._recording, _getframe(depth)
        token = recording.tokens.get((function, id(frame.f_code), frame.f_lasti, self._code))
        if token is None or token[2] is not None:
            return recording.record(function, (self,), {}, depth + 1)
        first = recording.num_values
        recording.num_values = first + 1
        recording.kinds.append(token[0])
        recording.taken.append(self._number)
        return Lazy(recording, first, token[1][0])

    @property
    def _like(self) -> Tensor:
        return self._recording.signatures.examples[self._code]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        lazy = next(item for item in flat((*arguments, *(keywords or {}).values())) if type(item) is Lazy)
        return lazy._recording.record(function, arguments, keywords or {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name)  # raises what a tensor would
        if not callable(method):
            return getattr(self._like, name)
        if name.endswith("_") and not name.endswith("__"):
            return lambda *arguments, **keywords: self._recording.change(
                self, getattr(Tensor, name[:-1]), arguments, keywords
            )
        return lambda *arguments, **keywords: self._recording.record(method, (self, *arguments), keywords)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise CannotBatchError("numbers are written into a tensor by index")

    def size(self, dim: int | None = None) -> Any:
        return self._like.shape if dim is None else self._like.shape[dim]

    def __len__(self) -> int:
        return len(self._like)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._recording.record(Tensor.unbind, (self,), {}))

    def __repr__(self) -> str:
        return f"Lazy({tuple(self._like.shape)}, {self._like.dtype})"

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return bool(self._recording.number_of(self))

    def __int__(self) -> int:
        return int(self._recording.number_of(self))

    def __float__(self) -> float:
        return float(self._recording.number_of(self))

    def __index__(self) -> int:
        return self._recording.number_of(self).__index__()

    def item(self) -> Any:
        return self._recording.number_of(self).item()

    def tolist(self) -> Any:
        return self._recording.number_of(self).tolist()

    def dim(self) -> int:
        return self._like.dim()

    def numel(self) -> int:
        return self._like.numel()


def _as_property(name: str) -> property:
    return property(lambda self: getattr(self._like, name))


def _as_operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    if name.startswith("__i") and name not in ("__invert__",):
        plain = getattr(Tensor, f"__{name[3:]}")
        return lambda self, *arguments: self._recording.change(self, plain, arguments, {})

    def operated(self: Lazy, *arguments: Any) -> Any:
        recording = self._recording
        if len(arguments) != 1 or type(arguments[0]) is not Lazy:
            return recording.record(method, (self, *arguments), {})
        other, frame = arguments[0], _getframe(1)
        token = recording.tokens.get((method, id(frame.f_code), frame.f_lasti, self._code, other._code))
        if token is None or token[2] is not None:
            return recording.record(method, (self, other), {})
        first = recording.num_values
        recording.num_values = first + 1
        recording.kinds.append(token[0])
        recording.taken += (self._number, other._number)
        return Lazy(recording, first, token[1][0])

    return operated


def _as_method(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    return lambda self, *arguments, **keywords: self._recording.record(method, (self, *arguments), keywords)


_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_sparse",
    "is_nested",
)
_BOTH_SIDES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OPERATORS = (
    *(f"__{side}{name}__" for name in _BOTH_SIDES for side in ("", "r", "i")),
    *(
        "__neg__",
        "__abs__",
        "__invert__",
        "__getitem__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__eq__",
        "__ne__",
    ),
)
for _each in _PROPERTIES:
    setattr(Lazy, _each, _as_property(_each))
for _each in _OPERATORS:
    if hasattr(Tensor, _each):
        setattr(Lazy, _each, _as_operator(_each))
for _each in dir(Tensor):
    is_method = not (_each.startswith("_") or _each.endswith("_")) and callable(getattr(Tensor, _each))
    if is_method and _each not in vars(Lazy):
        setattr(Lazy, _each, _as_method(_each))
for _each in ("T", "mT"):
    setattr(Lazy, _each, property(lambda self: self._recording.record(Tensor.t, (self,), {})))


def flat(items: Iterable[Any]) -> Iterator[Any]:
    """Arguments of an operation, those in tuples and lists too."""
    for item in items:
        if type(item) in (tuple, list):
            yield from flat(item)
        else:
            yield item
