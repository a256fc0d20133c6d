"""The tensors inside a batch (tuples, lists, mappings, dataclasses, nested), and words for what was found
instead.

Goes in: any value that a collate function or a model returns. Comes out: its tensors, the same structure
with every tensor replaced, or a short description for an error message. Never changes the value that it was
given.
"""

import copy
import dataclasses
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DEEPEST = 100_000
"""Calls of Python, one in the other, while a sample is copied: for chains of 16,000 objects; more may not fit."""


class Objects(list[Any]):
    """A list of text or other objects, one a sample, that the batch carries beside its tensors: a leaf of it."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return Objects(found) if isinstance(at, slice) else found


class _Replaced(TorchFunctionMode):
    """While objects are copied, tensors in them become what a function makes of them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._function(tensor)
        return memo[id(tensor)]


class _Parting(pickle.Pickler):
    """Writes objects without the tensors in them, which it keeps apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors[id(value)] = value
        return id(value)


class _Joining(pickle.Unpickler):
    """Reads objects that were written here, with other tensors in the places of those that they had."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[int, Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]


def map_objects(function: Callable[[Tensor], Tensor], objects: Objects) -> Objects:
    """Copies of objects with every tensor in them replaced.

    `function` changes elements one by one (their dtype, their device): it is given many tensors as one.
    """
    file = io.BytesIO()
    parting = _Parting(file)
    try:
        parting.dump(list(objects))
        file.seek(0)
        return Objects(_Joining(file, _mapped_together(function, parting.tensors)).load())
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return _copied_one_by_one(function, objects)


def _mapped_together(
    function: Callable[[Tensor], Tensor], tensors: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """One transfer for all tensors of a type: those of vertices are many and small."""
    made: dict[int, Tensor] = {}
    alike: dict[Any, list[int]] = {}
    for number, tensor in tensors.items():
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.requires_grad
        alike.setdefault((tensor.dtype, tensor.device) if plain else number, []).append(number)
    for numbers in alike.values():
        given = [tensors[number] for number in numbers]
        if len(given) == 1:
            made[numbers[0]] = function(given[0])
            continue
        whole = function(torch.cat([each.reshape(-1) for each in given]))
        pieces = torch.split(whole, [each.numel() for each in given])
        for number, piece, each in zip(numbers, pieces, given, strict=True):
            made[number] = piece.view(each.shape).data  # writing into one is not writing into the others
    return made


def _copied_one_by_one(function: Callable[[Tensor], Tensor], objects: Objects) -> Objects:
    """The same for objects of classes that cannot be looked up by name, and for long chains."""
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, _DEEPEST))
        with _Replaced(function):
            return Objects(copy.deepcopy(list(objects)))
    except Exception as error:  # of the objects' own making, such as a lock inside
        first = type(objects[0]).__name__ if objects else "nothing"
        warnings.warn(
            f"tensors inside of samples ({first}) stay as they are, on their device and in their dtype: "
            f"the samples cannot be copied ({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return objects
    finally:
        sys.setrecursionlimit(limit)


def with_objects(batch: Any) -> Any:
    """The batch with every list of what is no tensor as `Objects`, which are lists.

    A list or tuple that holds neither tensors nor numbers is one, and so are a list of dataclasses and one of trees.
    """
    if type(batch) is list and batch and all(map(_is_dataclass, batch)):
        return Objects(batch)
    if type(batch) in (list, tuple):
        numbers = [isinstance(item, int | float) for item in batch]
        mixed = any(isinstance(item, tuple | list) for item in batch)  # trees, of which some are a leaf
        if (mixed or not any(numbers)) and next(tensors_in(batch), None) is None:
            return Objects(batch)
        return type(batch)(with_objects(item) for item in batch)
    if isinstance(batch, dict):
        return copied(batch, with_objects)
    return batch


def copied(tree: MutableMapping[Any, Any], function: Callable[[Any], Any]) -> Any:
    """A mapping of the same class with every value replaced."""
    if type(tree) is dict:
        return {key: function(value) for key, value in tree.items()}
    made = copy.copy(tree)
    for key, value in tree.items():
        made[key] = function(value)
    return made


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in the tree, in the order in which it is written down."""
    left = [tree]
    while left:  # no recursion: a sample may be nested as deep as it likes
        now = left.pop()
        if isinstance(now, Tensor):
            yield now
        else:
            left.extend(reversed(list(_children(now))))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same structure with every tensor replaced; what is not a tensor is passed on as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Objects):
        return tree
    if isinstance(tree, tuple):
        items = [map_tensors(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [map_tensors(function, item) for item in tree]
    if isinstance(tree, MutableMapping):
        return copied(tree, lambda value: map_tensors(function, value))
    if _is_dataclass(tree):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(
            tree, **{name: map_tensors(function, getattr(tree, name)) for name in fields}
        )
    return tree


def no_rows(batch: Any) -> Any:
    """The batch with every tensor cut to 0 rows on dim 0, and lists of objects emptied; scalars stay."""
    if isinstance(batch, Objects):
        return Objects()
    if isinstance(batch, dict):
        return {key: no_rows(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(no_rows(item) for item in batch)
    return map_tensors(lambda tensor: tensor[:0] if tensor.dim() else tensor, batch)


def describe(value: Any) -> str:
    """What a value is, for an error message: `a Tensor of shape (32, 10)`, `a tuple of (Tensor, str)`, `None`."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        inside = [type(item).__name__ for item in value[:5]] + (["..."] if len(value) > 5 else [])
        return f"{_article(type(value).__name__)} of ({', '.join(inside)})"
    if isinstance(value, Mapping):
        return f"{_article(type(value).__name__)} with the keys {list(value)[:8]}"
    if isinstance(value, bool | int | float | str | bytes):
        return f"the {type(value).__name__} {value!r:.80}"
    return _article(type(value).__name__)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeio" else f"a {noun}"


def _children(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        yield from tree
    elif isinstance(tree, Mapping):
        yield from tree.values()
    elif _is_dataclass(tree):
        yield from (getattr(tree, field.name) for field in dataclasses.fields(tree))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
