"""Operations of code for one sample, written down instead of run.

In: the user's code, called with values that are not there yet (`lazy.py`). Out: a `Recording`: what each operation is
(its signature: the function, the shapes that it sees, its constants), and which values it takes. Shapes are known at
once, numbers only where the code asks for one: then what it needs is computed, for that sample alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.dynamic.lazy import Lazy, flat
from plait.dynamic.signatures import (
    CannotBatchError,
    Hole,
    Shared,
    Signature,
    Signatures,
    drawing_watch,
    mapped,
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

    def lazy(self, tensor: Tensor) -> Lazy:
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
            if isinstance(item, Tensor) and id(item) in self.names:
                names[self.names[id(item)]] = item
                return Shared(self.names[id(item)])
            if type(item) is Lazy:
                sees.append(item._code)
            elif isinstance(item, Tensor):
                sees.append(self.signatures.code(item))
            else:
                return item
            return Hole(len(sees) - 1)

        given, named = mapped(tuple(arguments), emptied), mapped(keywords, emptied)
        return self.signatures.add(key, function, given, named, sees, names)

    def change(self, lazy: Lazy, function: Callable[..., Any], arguments: Any, keywords: Any) -> Lazy:
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

    def number_of(self, value: Lazy) -> Tensor:
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
        for item in flat((*args, *keywords.values())):
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
