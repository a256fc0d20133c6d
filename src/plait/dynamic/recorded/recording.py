"""Operations of code for one sample, written down instead of run.

In: the user's code, called with values that are not there yet (`lazy.py`). Out: a `Recording`: what each operation is
(its signature: the function, the shapes that it sees, its constants), and which values it takes. Shapes are known at
once, numbers only where the code asks for one: then what it needs is computed, for that sample alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import _getframe
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from plait.dynamic.recorded.lazy import Lazy, flat
from plait.dynamic.recorded.signatures import (
    CannotBatchError,
    Hole,
    Shared,
    Signatures,
    Token,
    drawing_watch,
    mapped,
    name_of,
)
from plait.dynamic.structure import Array


class Leaf:
    """A module as one operation: a function of values and of its own parameters."""

    def __init__(self, module: nn.Module, names: Mapping[str, str]) -> None:
        self.module, self.names = module, names
        """`names`: those that the whole model has for the module's parameters."""
        self.__name__ = type(module).__name__

    def __call__(self, *values: Any, parameters: Mapping[str, Tensor]) -> Any:
        given = {own: parameters[name] for own, name in self.names.items()}
        return functional_call(self.module, given, values)


class Recording:
    """Operations in the order in which they were called, and the values that they make.

    Code for one sample makes tens of thousands of calls a batch: what is written down for each is four numbers.
    """

    def __init__(self, parameters: dict[str, Tensor], signatures: Signatures) -> None:
        self.parameters, self.signatures, self.tokens = parameters, signatures, signatures.tokens
        self.names = {id(value): name for name, value in parameters.items()}
        self.kinds: list[int] = []
        """The token of each call."""
        self.begins: list[int] = []
        """The first call of each sample."""
        self.taken: list[int] = []
        """The values that calls take, one call after the other."""
        self.num_values = 0
        self.given: dict[int, Tensor] = {}
        """Values that were there before."""
        self._known: dict[int, Tensor] = {}
        """Numbers that were asked for."""
        self._shared: set[int] = set()
        """Values that are views, or have some, as far as calls were gone through."""
        self._starts = [0]
        """Where the values that each call takes begin in `taken`, as far as calls were gone through."""
        self._firsts: list[int] = []
        """The first value that each of them makes; the others follow."""
        self._derived: dict[Any, Any] = {}
        """What was made of parameters alone, once for all samples."""
        self.is_paused = False

    @property
    def firsts(self) -> Array:
        """The first value that each call makes; the others follow, and values that were given lie in between."""
        made = np.ones(self.num_values, dtype=bool)
        made[list(self.given)] = False
        counts = np.array([len(each.makes) for each in self.signatures.of_token])[self.kinds]
        found: Array = np.append(np.flatnonzero(made), 0)[np.cumsum(counts) - counts]
        return found

    def lazy(self, tensor: Tensor) -> Lazy:
        """A tensor that is there, as a value like others: one that the code made for this sample, or was given."""
        number = self.num_values
        self.num_values = number + 1
        self.given[number] = tensor
        return Lazy(self, number, self.signatures.code(tensor))

    def record(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        depth: int = 2,
    ) -> Any:
        """Write an operation down; its results are `Lazy`. `depth`: how far up the code is that calls it."""
        seen: list[int] = []
        frame = _getframe(depth)  # what always comes after what is told apart by the place in the code
        key: Any = (function, id(frame.f_code), frame.f_lasti, *[self._key(item, seen) for item in arguments])
        if keywords:
            key = (*key, *[(name, self._key(item, seen)) for name, item in keywords.items()])
        token = self.tokens.get(key)
        if token is None:
            token = self._new(key, function, arguments, keywords)
        number, codes, container = token
        first = self.num_values
        self.kinds.append(number)
        self.taken += seen
        self.num_values = first + len(codes)
        if container is None:
            return Lazy(self, first, codes[0])
        return container([Lazy(self, at, code) for at, code in enumerate(codes, first)])

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
                return name
            lazy = self.lazy(item)
            seen.append(lazy._number)
            return lazy._code
        if kind is slice:
            return (slice, item.start, item.stop, item.step)
        return (kind, item)

    def _new(self, key: Any, function: Callable[..., Any], arguments: Any, keywords: Any) -> Token:
        """The token of a call that is met for the first time."""
        plain = (key[0], *key[3:])
        if plain in self.signatures.known:
            return self.signatures.token(key, self.signatures.known[plain])
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
        if isinstance(function, Leaf):
            names |= {name: self.parameters[name] for name in function.names.values()}
            named = {"parameters": {name: Shared(name) for name in function.names.values()}}
        with self.paused():
            made = self.signatures.add(plain, function, given, named, sees, names)
        return self.signatures.token(key, made)

    def change(self, lazy: Lazy, function: Callable[..., Any], arguments: Any, keywords: Any) -> Lazy:
        """In place: nobody else may see the same storage."""
        self._go_through()
        if lazy._number in self._shared:
            raise CannotBatchError(f"{name_of(function)} changes a view, or what has views, in place")
        made = self.record(function, (lazy, *arguments), keywords, 3)
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

    def _go_through(self) -> None:
        """Note of all calls what only few ask for."""
        first, given = self._firsts[-1] if self._firsts else 0, self.given
        if self._firsts:
            first += len(self.signatures.of_token[self.kinds[len(self._firsts) - 1]].makes)
        for kind in self.kinds[len(self._firsts) :]:
            while first in given:
                first += 1
            signature, begin = self.signatures.of_token[kind], self._starts[-1]
            self._firsts.append(first)
            self._starts.append(begin + len(signature.sees))
            if signature.shares:
                self._shared.update(self.taken[begin : self._starts[-1]])
                self._shared.update(range(first, first + len(signature.makes)))
            first += len(signature.makes)

    def number_of(self, value: Lazy) -> Tensor:
        """What a value is, computed now, for the code that asks."""
        self._go_through()
        starts, firsts = self._starts, self._firsts
        todo, needed = [value._number], set()
        while todo:
            number = todo.pop()
            if number in self._known or number in self.given:
                continue
            call = bisect_right(firsts, number) - 1
            if call not in needed:
                needed.add(call)
                todo += self.taken[starts[call] : starts[call + 1]]
        with torch.no_grad(), self.paused():
            for call in sorted(needed):
                signature = self.signatures.of_token[self.kinds[call]]
                if signature.is_random:
                    raise CannotBatchError("a branch depends on random numbers, which would be drawn again")
                takes = self.taken[starts[call] : starts[call + 1]]
                values = [
                    self.given[number] if number in self.given else self._known[number] for number in takes
                ]
                made = signature.call(values, self.parameters)
                self._known.update({firsts[call] + index: part for index, part in enumerate(made)})
        number = value._number
        return self.given[number] if number in self.given else self._known[number]


class Recorder(TorchFunctionMode):
    """While active, what the code does with a sample's values is written down."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, keywords = self._recording, kwargs or {}
        first = args[0] if args else None
        if type(first) is Lazy:  # first, as nearly all calls are
            if len(args) == 1 and not keywords:
                return first._recorded(function, 2)
            return recording.record(function, args, keywords)
        if type(first) is list and first and type(first[0]) is Lazy:
            return recording.record(function, args, keywords)
        if recording.is_paused or getattr(function, "__name__", "") == "__get__":
            return function(*args, **keywords)
        of_sample = of_parameter = False
        for item in flat((*args, *keywords.values())):
            if type(item) is Lazy:
                return recording.record(function, args, keywords)
            if isinstance(item, Tensor):
                of_parameter |= id(item) in recording.names
                of_sample |= id(item) not in recording.names
        if of_parameter:
            if of_sample:
                return recording.record(function, args, keywords)
            return recording.derived(function, args, keywords)
        return function(*args, **keywords)
