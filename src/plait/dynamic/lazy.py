"""Operations of code for one sample, written down instead of run.

In: the user's code, called with values that are not there yet. Out: a `Recording`: what each operation is (its
signature: the function, the shapes that it sees, its constants), and which values it takes. Shapes are known at once,
numbers only where the code asks for one: then what it needs is computed, for that sample alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.dynamic.signatures import (
    CannotBatchError,
    Hole,
    Shared,
    Signature,
    Signatures,
    drawing_watch,
    name_of,
)


class Recording:
    """Operations in the order in which they were called, and the values that they make.

    Code for one sample makes tens of thousands of calls a batch: what is written down for each is four numbers.
    """

    def __init__(self, parameters: dict[str, Tensor], signatures: Signatures) -> None:
        self.parameters, self.signatures = parameters, signatures
        self.names = {id(value): name for name, value in parameters.items()}
        self.kinds: list[int] = []
        """The signature of each call."""
        self.firsts: list[int] = []
        """The first value that each call makes; the others follow."""
        self.taken: list[int] = []
        """The values that calls take, one call after the other."""
        self.num_values = 0
        self.given: dict[int, Tensor] = {}
        """Values that were there before."""
        self._shared: set[int] = set()
        """Values that are views, or have some."""
        self._known: dict[int, Tensor] = {}
        """Numbers that were asked for."""
        self._starts = [0]
        """Where the values that each call takes begin in `taken`, as far as numbers were asked for."""
        self._derived: dict[Any, Any] = {}
        """What was made of parameters alone, once for all samples."""
        self.is_paused = False
        self._find = signatures.known.get
        self._note_kind, self._note_first, self._note_taken = (
            self.kinds.append,
            self.firsts.append,
            self.taken.extend,
        )

    def lazy(self, tensor: Tensor) -> "Lazy":
        """A tensor that is there, as a value like others: one that the code made for this sample, or was given."""
        number = self.num_values
        self.num_values = number + 1
        self.given[number] = tensor
        return Lazy(self, number, self.signatures.code(tensor))

    def record(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """Write an operation down; its results are `Lazy`."""
        seen: list[int]
        key: Any
        last = arguments[-1]
        if type(last) is Lazy and len(arguments) == 1 and not keywords:
            key, seen = (function, last._code), [last._number]
        elif type(last) is Lazy and len(arguments) == 2 and not keywords and type(arguments[0]) is Lazy:
            before = arguments[0]
            key, seen = (function, before._code, last._code), [before._number, last._number]
        else:
            seen = []
            key = (function, *[self._key(item, seen) for item in arguments])
            if keywords:
                key = (*key, *[(name, self._key(item, seen)) for name, item in keywords.items()])
        signature = self._find(key)
        if signature is None:
            signature = self._new(key, function, arguments, keywords)
        first = self.num_values
        self._note_kind(signature.number)
        self._note_first(first)
        self._note_taken(seen)
        codes = signature.codes
        if signature.shares:
            self._shared.update(seen)
            self._shared.update(range(first, first + len(codes)))
        if signature.container is None:
            self.num_values = first + 1
            return Lazy(self, first, codes[0])
        self.num_values = first + len(codes)
        return signature.container([Lazy(self, first + index, code) for index, code in enumerate(codes)])

    def _key(self, item: Any, seen: list[int]) -> Any:
        """What tells calls apart in an argument that is not a value; tensors of the sample become values."""
        kind = type(item)
        if kind is Lazy:
            seen.append(item._number)
            return item._code
        if kind is tuple or kind is list:
            return (kind, *[self._key(part, seen) for part in item])
        if isinstance(item, Tensor):
            name = self.names.get(id(item))
            if name is not None:
                return (Shared, name)
            lazy = self.lazy(item)
            seen.append(lazy._number)
            return lazy._code
        if kind is slice:
            return (slice, item.start, item.stop, item.step)
        return (kind, item)

    def _new(self, key: Any, function: Callable[..., Any], arguments: Any, keywords: Any) -> Signature:
        """The signature of a call that is met for the first time."""
        sees: list[int] = []
        names: dict[str, Tensor] = {}

        def emptied(item: Any) -> Any:
            if type(item) is Lazy:
                sees.append(item._code)
                return Hole(len(sees) - 1)
            if isinstance(item, Tensor) and id(item) in self.names:
                names[self.names[id(item)]] = item
                return Shared(self.names[id(item)])
            if isinstance(item, Tensor):
                sees.append(self.signatures.code(item))
                return Hole(len(sees) - 1)
            if isinstance(item, (tuple, list)):
                return type(item)([emptied(part) for part in item])
            return item

        given = tuple(emptied(item) for item in arguments)
        named = {name: emptied(item) for name, item in keywords.items()}
        return self.signatures.add(key, function, given, named, sees, names)

    def change(self, lazy: "Lazy", function: Callable[..., Any], arguments: Any, keywords: Any) -> "Lazy":
        """In place: nobody else may see the same storage."""
        if lazy._number in self._shared:
            raise CannotBatchError(f"{name_of(function)} changes a view, or what has views, in place")
        made = self.record(function, (lazy, *arguments), keywords)
        lazy._number, lazy._code = made._number, made._code
        return lazy

    def derived(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """What a function makes of parameters alone: shared by all samples as they are."""
        key: Any = (function, *[self._key(item, []) for item in (*arguments, *keywords.items())])
        if key not in self._derived:
            with drawing_watch() as drawing:
                made = function(*arguments, **keywords)
            if drawing.seen:
                raise CannotBatchError(f"{name_of(function)} draws random numbers for parameters")
            for part in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(part, Tensor):
                    self.parameters[f"made {len(self.names)}"] = part
                    self.names[id(part)] = f"made {len(self.names)}"
            self._derived[key] = made
        return self._derived[key]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, operations are run."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def number_of(self, value: "Lazy") -> Tensor:
        """What a value is, computed now, for the code that asks."""
        starts = self._starts
        for kind in self.kinds[len(starts) - 1 :]:
            starts.append(starts[-1] + len(self.signatures.numbered[kind].sees))
        todo, needed = [value._number], set()
        while todo:
            number = todo.pop()
            if number in self._known or number in self.given:
                continue
            call = bisect_right(self.firsts, number) - 1
            if call not in needed:
                needed.add(call)
                todo += self.taken[starts[call] : starts[call + 1]]
        with torch.no_grad(), self.paused():
            for call in sorted(needed):
                signature = self.signatures.numbered[self.kinds[call]]
                if signature.is_random:
                    raise CannotBatchError("a branch depends on random numbers, which would be drawn again")
                takes = self.taken[starts[call] : starts[call + 1]]
                values = [
                    self.given[number] if number in self.given else self._known[number] for number in takes
                ]
                made = signature.call(values, self.parameters)
                self._known.update({self.firsts[call] + index: part for index, part in enumerate(made)})
        number = value._number
        return self.given[number] if number in self.given else self._known[number]


class Lazy:
    """A tensor of one sample whose numbers are not there yet. Behaves as a tensor does."""

    __slots__ = ("_code", "_number", "_recording")

    def __init__(self, recording: Recording, number: int, code: int) -> None:
        self._recording = recording
        self._number = number
        self._code = code

    @property
    def _like(self) -> Tensor:
        return self._recording.signatures.examples[self._code]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        lazy = next(item for item in _flat((*arguments, *(keywords or {}).values())) if type(item) is Lazy)
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
    return lambda self, *arguments: self._recording.record(method, (self, *arguments), {})


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
for _each in ("T", "mT"):
    setattr(Lazy, _each, property(lambda self: self._recording.record(Tensor.t, (self,), {})))


class Recorder(TorchFunctionMode):
    """While active, what the code does with a sample's values is written down."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, keywords = self._recording, kwargs or {}
        if recording.is_paused:
            return function(*args, **keywords)
        for item in args:
            if type(item) is Lazy:
                return recording.record(function, args, keywords)
        of_sample = of_parameter = False
        for item in _flat((*args, *keywords.values())):
            if type(item) is Lazy:
                return recording.record(function, args, keywords)
            if isinstance(item, Tensor):
                of_parameter |= id(item) in recording.names
                of_sample |= id(item) not in recording.names
        if of_parameter and name_of(function) != "__get__":
            if of_sample:
                return recording.record(function, args, keywords)
            return recording.derived(function, args, keywords)
        return function(*args, **keywords)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if type(item) in (tuple, list):
            yield from _flat(item)
        else:
            yield item
