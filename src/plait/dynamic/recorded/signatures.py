"""What recorded operations have in common that can be one call.

In: a function with its arguments, where values and parameters leave holes. Out: a `Signature`: what it makes, as
tensors without numbers. Nothing is computed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.torch_private.dispatch import TorchDispatchMode
from plait.torch_private.fake import FakeTensorMode, storage_of


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


Token = tuple[int, tuple[int, ...], type | None]
"""A call at one place of the code: its number, then codes and container of its signature."""
_UNKNOWN, _SEVERAL = -1, -2
"""In the place of a token's number: none was seen yet; several were."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a value goes that another operation makes."""

    index: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Where a parameter goes."""

    name: str


def mapped(given: Any, function: Callable[[Any], Any]) -> Any:
    """The same arguments, nested as they are, with a function applied to each that is not a container."""
    if isinstance(given, (tuple, list)):
        return type(given)([mapped(item, function) for item in given])
    if isinstance(given, Mapping):
        return {key: mapped(item, function) for key, item in given.items()}
    return function(given)


def _filled(given: Any, values: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Any:
    def fill(item: Any) -> Any:
        if isinstance(item, Hole):
            return values[item.index]
        return parameters[item.name] if isinstance(item, Shared) else item

    return mapped(given, fill)


class CannotBatchError(Exception):
    """The code does something that only tensors with numbers can; it has to run as it is."""


class Signatures:
    """All signatures that were ever met."""

    def __init__(self) -> None:
        self.known: dict[Any, Signature] = {}
        self.numbered: list[Signature] = []
        """Of operations, and of blocks of them."""
        self.tokens: dict[Any, Token] = {}
        """By call and the place in the code that makes it."""
        self.of_token: list[Signature] = []
        self.follower: list[int] = []
        """Of each token the one that always comes next."""
        self.leader: list[int] = []
        """Of each token the one that always comes before."""
        self.leaves: dict[nn.Module, Any] = {}
        """Modules that are one operation."""
        self.blocks: dict[Any, tuple[Signature, Any]] = {}
        """Of operations that come one after the other, by what they are and how they are connected."""
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

    def token(self, key: Any, signature: Signature) -> Token:
        """A new one."""
        found = self.tokens[key] = (len(self.of_token), signature.codes, signature.container)
        self.of_token.append(signature)
        self.follower.append(_UNKNOWN)
        self.leader.append(_UNKNOWN)
        return found

    def note_neighbours(
        self, pairs: Iterable[tuple[int, int]], begins: Iterable[int], ends: Iterable[int]
    ) -> None:
        """Which tokens came right after which others, and at which samples begin and end."""
        for before, after in pairs:
            self.follower[before] = after if self.follower[before] in (_UNKNOWN, after) else _SEVERAL
            self.leader[after] = before if self.leader[after] in (_UNKNOWN, before) else _SEVERAL
        for token in begins:
            self.leader[token] = _SEVERAL
        for token in ends:
            self.follower[token] = _SEVERAL

    def example(self, tensor: Tensor) -> Tensor:
        return self.examples[self.code(tensor)]

    def add(
        self,
        key: Any,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        codes: Sequence[int],
        parameters: Mapping[str, Tensor],
    ) -> Signature:
        """A new one: the operation is run without numbers, to know what it makes."""
        sees = tuple(self.examples[code] for code in codes)
        known = {name: self.examples[self.code(value)] for name, value in parameters.items()}
        try:
            with drawing_watch() as drawing, self._mode, torch.no_grad():
                made = function(*_filled(arguments, sees, known), **_filled(keywords, sees, known))
        except Exception as error:
            raise CannotBatchError(f"{name_of(function)}: {error}") from error
        parts = (made,) if isinstance(made, Tensor) else made
        if not isinstance(parts, (tuple, list)) or not all(isinstance(part, Tensor) for part in parts):
            raise CannotBatchError(f"{name_of(function)} gives {type(made).__name__}")
        stores = {storage_of(part) for part in sees}
        signature = Signature(
            number=len(self.numbered),
            function=function,
            arguments=arguments,
            keywords=keywords,
            sees=sees,
            makes=tuple(self.examples[self.code(part)] for part in parts),
            codes=tuple(self.code(part) for part in parts),
            container=None if isinstance(made, Tensor) else list if isinstance(made, list) else tuple,
            parameters=known,
            is_random=drawing.seen,
            shares=any(storage_of(part) in stores for part in parts),
        )
        self.known[key] = signature
        self.numbered.append(signature)
        return signature


def name_of(function: Any) -> str:
    """What a function is called in messages."""
    return str(getattr(function, "__name__", function))


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices random numbers."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


def drawing_watch() -> Any:
    """While active, `seen` becomes true where random numbers are drawn."""
    return _Drawing()  # type: ignore[no-untyped-call]
