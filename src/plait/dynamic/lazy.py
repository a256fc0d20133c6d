"""Operations of code for one sample, written down instead of run.

In: the user's code, called with values that are not there yet. Out: a `Recording`: what each operation is (its
signature: the function, the shapes that it sees, its constants), and which values it takes. Shapes are known at once,
numbers only where the code asks for one: then what it needs is computed, for that sample alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.torch_private.dispatch import TorchDispatchMode
from plait.torch_private.fake import FakeTensorMode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Signature:
    """What operations have in common that can be one call."""

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """As they were given, with `Hole`s for values and `Shared` for parameters."""
    keywords: Mapping[str, Any]
    sees: tuple[Tensor, ...]
    """An example of each value that it takes."""
    makes: tuple[Tensor, ...]
    codes: tuple[int, ...]
    """The codes of what it makes."""
    container: type | None
    """What holds the results; None: it is one tensor."""
    parameters: Mapping[str, Tensor]
    """An example of each parameter that it takes."""
    shares: bool
    """Whether results are views of what it takes."""
    is_random: bool

    def call(self, values: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run it."""
        made = self.function(
            *_filled(self.arguments, values, parameters), **_filled(self.keywords, values, parameters)
        )
        return (made,) if isinstance(made, Tensor) else tuple(made)


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a value goes that another operation makes."""

    index: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Where a parameter goes."""

    name: str


def _filled(given: Any, values: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Any:
    if isinstance(given, Hole):
        return values[given.index]
    if isinstance(given, Shared):
        return parameters[given.name]
    if isinstance(given, (tuple, list)):
        return type(given)(_filled(item, values, parameters) for item in given)
    if isinstance(given, Mapping):
        return {key: _filled(item, values, parameters) for key, item in given.items()}
    return given


class CannotBatchError(Exception):
    """The code does something that only tensors with numbers can; it has to run as it is."""


class Recording:
    """Operations in the order in which they were called, and the values that they make.

    Code for one sample makes tens of thousands of calls a batch: what is written down for each is four numbers.
    """

    def __init__(self, parameters: dict[str, Tensor], signatures: "Signatures") -> None:
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
        self._derived: dict[Any, Any] = {}
        """What was made of parameters alone, once for all samples."""
        self.is_paused = False
        self._find = signatures.known.get
        self._note_kind, self._note_first, self._note_taken = self.kinds.append, self.firsts.append, self.taken.extend

    def lazy(self, tensor: Tensor) -> "Lazy":
        """A tensor that is there, as a value like others: one that the code made for this sample, or was given."""
        number = self.num_values
        self.num_values = number + 1
        self.given[number] = tensor
        return Lazy(self, number, self.signatures.code(tensor))

    def record(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
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
            signature = self.signatures.add(key, function, arguments, keywords, self)
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

    def change(self, lazy: "Lazy", function: Callable[..., Any], arguments: Any, keywords: Any) -> "Lazy":
        """In place: nobody else may see the same storage."""
        if lazy._number in self._shared:
            raise CannotBatchError(f"{_name(function)} changes a view, or what has views, in place")
        made = self.record(function, (lazy, *arguments), keywords)
        lazy._number, lazy._code = made._number, made._code
        return lazy

    def derived(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """What a function makes of parameters alone: shared by all samples as they are."""
        key: Any = (function, *[self._key(item, []) for item in (*arguments, *keywords.items())])
        if key not in self._derived:
            with _Drawing() as drawing:
                made = function(*arguments, **keywords)
            if drawing.seen:
                raise CannotBatchError(f"{_name(function)} draws random numbers for parameters")
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
        starts = [0]
        for kind in self.kinds:
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
                values = [self.given[number] if number in self.given else self._known[number] for number in takes]
                made = signature.call(values, self.parameters)
                self._known.update({self.firsts[call] + index: part for index, part in enumerate(made)})
        number = value._number
        return self.given[number] if number in self.given else self._known[number]


class Signatures:
    """All signatures that were ever met."""

    def __init__(self) -> None:
        self.known: dict[Any, Signature] = {}
        self.numbered: list[Signature] = []
        self.examples: list[Tensor] = []
        """The tensor without numbers that stands for all of its shape, by code."""
        self._codes: dict[Any, int] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def code(self, tensor: Tensor) -> int:
        """The code of tensors of this shape, type and device."""
        key = (tensor.shape, tensor.dtype, tensor.device)
        found = self._codes.get(key)
        if found is None:
            found = self._codes[key] = len(self.examples)
            with self._mode:
                self.examples.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
        return found

    def example(self, tensor: Tensor) -> Tensor:
        return self.examples[self.code(tensor)]

    def add(
        self, key: Any, function: Callable[..., Any], arguments: Any, keywords: Any, recording: Recording
    ) -> Signature:
        """Run an operation without numbers, to know what it makes."""
        sees: list[Tensor] = []
        names: dict[str, Tensor] = {}

        def emptied(item: Any) -> Any:
            if type(item) is Lazy or (isinstance(item, Tensor) and id(item) not in recording.names):
                sees.append(self.examples[item._code] if type(item) is Lazy else self.example(item))
                return Hole(len(sees) - 1)
            if isinstance(item, Tensor):
                names[recording.names[id(item)]] = item
                return Shared(recording.names[id(item)])
            if isinstance(item, (tuple, list)):
                return type(item)([emptied(part) for part in item])
            return item

        given = tuple(emptied(item) for item in arguments)
        named = {name: emptied(item) for name, item in keywords.items()}
        try:
            parameters = {name: self.example(value) for name, value in names.items()}
            with _Drawing() as drawing, self._mode, torch.no_grad():
                made = function(*_filled(given, sees, parameters), **_filled(named, sees, parameters))
        except Exception as error:
            raise CannotBatchError(f"{_name(function)}: {error}") from error
        parts = (made,) if isinstance(made, Tensor) else made
        if not isinstance(parts, (tuple, list)) or not all(isinstance(part, Tensor) for part in parts):
            raise CannotBatchError(f"{_name(function)} gives {type(made).__name__}")
        stores = {part.untyped_storage()._cdata for part in sees}
        signature = Signature(
            number=len(self.known),
            function=function,
            arguments=given,
            keywords=named,
            sees=tuple(sees),
            makes=tuple(self.example(part) for part in parts),
            codes=tuple(self.code(part) for part in parts),
            container=None if isinstance(made, Tensor) else list if isinstance(made, list) else tuple,
            parameters=parameters,
            is_random=drawing.seen,
            shares=any(part.untyped_storage()._cdata in stores for part in parts),
        )
        self.known[key] = signature
        self.numbered.append(signature)
        return signature


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


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

    @property
    def __class__(self) -> Any:  # type: ignore[override]
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
            return lambda *arguments, **keywords: self._recording.change(self, getattr(Tensor, name[:-1]), arguments, keywords)
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


_PROPERTIES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_sparse", "is_nested")
_BOTH_SIDES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OPERATORS = (
    *(f"__{side}{name}__" for name in _BOTH_SIDES for side in ("", "r", "i")),
    *("__neg__", "__abs__", "__invert__", "__getitem__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
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
        super().__init__()  # type: ignore[no-untyped-call]
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
        if of_parameter and _name(function) != "__get__":
            if of_sample:
                return recording.record(function, args, keywords)
            return recording.derived(function, args, keywords)
        return function(*args, **keywords)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices random numbers."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if type(item) in (tuple, list):
            yield from _flat(item)
        else:
            yield item
