"""The places of Python objects in which a forward pass can leave something for the next.

In: an object, and what the user would call it. Out: a `Held` for each group of its places, with the way back. Followed
are attributes, slots, lists, dicts, sets, arrays, iterators, generators of random numbers, caches, context variables,
closures, the globals that functions name and attributes of the user's own classes; never the insides of torch, and of
other libraries only what their objects hold.
"""

import functools
import gc
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.folders import PLAIT, TORCH, is_package, is_standard
from plait.job.model.states import NAMELESS, Nameless, numbers_of, position_of
from plait.torch_private.autograd import hooks_of, version_of
from plait.torch_private.fake import FakeTensor
from plait.torch_private.modules import attributes_of, children_of, hooks_of_module, tables_of

_LARGEST_BYTES = 1 << 20
"""Of a tensor that is copied to be put back: larger ones are weights or data."""
_CACHED: Any = type(functools.lru_cache(len))
"""What `functools.lru_cache` makes."""


@dataclass(frozen=True, slots=True)
class Held:
    """Places of one object, and what was in them."""

    path: str
    read: Callable[[], dict[Any, Any]]
    """What is in them now."""
    write: Callable[[dict[Any, Any]], None]
    """Put that back; nothing where it cannot be."""
    contents: dict[Any, Any]
    versions: dict[Any, int]
    """Of the tensors among them: how often they were written to."""
    values: dict[Any, Tensor]
    """Of those that have values, and are not large: copies."""
    is_emptied: bool = False
    """Putting back empties it: what was in it is computed again when it is asked for."""


def joined(path: str, key: Any) -> str:
    """What a place in something is called; one that has no name of its own is the thing itself."""
    if isinstance(key, Nameless):
        return path
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def places_of(path: str, value: Any, tensors: bool) -> Iterator[Held]:
    """The places that an object has; `tensors`: parameters and buffers of a module too."""
    if isinstance(value, nn.Module):
        yield from _module(path, value, tensors)
    elif isinstance(value, dict):
        yield _held(path, lambda: dict(value), lambda old: _reset(value, old))
    elif isinstance(value, list | deque):
        yield _held(path, lambda: dict(enumerate(value)), lambda old: _refill(value, old))
    elif isinstance(value, tuple):
        yield _held(path, lambda: dict(enumerate(value)), lambda old: None)
    elif isinstance(value, set):
        yield _held(path, lambda: dict.fromkeys(value, True), lambda old: _reset(value, old))
    elif isinstance(value, functools.partial):
        inside = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield _held(path, lambda: inside, lambda old: None)
    elif isinstance(value, types.MethodType):
        yield _held(path, lambda: {"__self__": value.__self__, "__func__": value.__func__}, lambda old: None)
    elif isinstance(value, types.FunctionType):
        yield from _function(path, value)
    elif isinstance(value, _CACHED):
        yield _cache(path, value)
    elif isinstance(value, ContextVar):
        yield _held(path, lambda: _in_context(value), lambda old: _set_context(value, old))
    elif isinstance(value, types.ModuleType):
        if _is_users_file(getattr(value, "__file__", None) or "<frozen"):
            names = [n for n in vars(value) if not n.startswith("__")]
            yield _globals(value.__name__, vars(value), names)
    elif isinstance(value, type):
        if _is_users(value):
            yield from _class(value)
    elif (numbers := numbers_of(value)) is not None:
        yield _held(path, *numbers)
    elif hasattr(value, "__next__") and not _is_users(type(value)):
        yield _held(path, lambda: {NAMELESS: position_of(value)}, lambda old: None)
    elif _is_followed(type(value)):
        yield from _object(path, value)


def _in_context(variable: ContextVar[Any]) -> dict[Any, Any]:
    try:
        return {NAMELESS: variable.get()}
    except LookupError:
        return {}


def _set_context(variable: ContextVar[Any], old: dict[Any, Any]) -> None:
    if old:
        variable.set(old[NAMELESS])


def _module(path: str, module: nn.Module, tensors: bool) -> Iterator[Held]:
    def read() -> dict[str, Any]:
        parameters, _ = tables_of(module)
        own = attributes_of(module)
        own |= {f"{name}.requires_grad": p.requires_grad for name, p in parameters.items() if p is not None}
        return own | {f"hooks of {kind}": len(hooks) for kind, hooks in hooks_of_module(module).items()}

    def write(old: dict[str, Any]) -> None:
        known = vars(module)
        for name in [name for name in attributes_of(module) if name not in old]:
            del known[name]
        known.update({name: entry for name, entry in old.items() if name in known})

    yield _held(path, read, write)
    if tensors:
        for table in tables_of(module):
            yield _held(path, partial(dict, table), partial(_reset, table))
    hooks = [hook for entries in hooks_of_module(module).values() for hook in entries]
    hooks += [hook for p in tables_of(module)[0].values() if p is not None for hook in hooks_of(p)]
    yield _held(f"{path}'s hooks", lambda: dict(enumerate(hooks)), lambda old: None)
    children = children_of(module)
    yield _held(path, lambda: dict(children), lambda old: _reset(children, old))
    if _is_users(type(module)):
        yield from _class(type(module))


def _object(path: str, value: Any) -> Iterator[Held]:
    """Attributes, and slots, of an object that is nothing of the above."""
    kind = type(value)
    if hasattr(value, "__dict__"):
        yield _held(path, lambda: dict(vars(value)), lambda old: _reset(vars(value), old))
    slots = [
        n for base in kind.__mro__ for n, v in vars(base).items() if isinstance(v, types.MemberDescriptorType)
    ]
    if slots:

        def write(old: dict[str, Any]) -> None:
            for name, entry in old.items():
                object.__setattr__(value, name, entry)

        yield _held(path, lambda: {n: getattr(value, n) for n in slots if hasattr(value, n)}, write)
    if _is_users(kind):
        yield from _class(kind)


def environment() -> Held:
    """Variables of this process."""

    def write(old: dict[Any, Any]) -> None:
        for name in [name for name in os.environ if name not in old]:
            del os.environ[name]
        os.environ.update(old)

    return _held("os.environ", lambda: dict(os.environ), write)


def _cache(path: str, value: Any) -> Held:
    """What `functools.lru_cache` keeps: it is emptied where something was added."""

    def read() -> dict[Any, Any]:
        inside = gc.get_referents(value)
        kept = [*inside, *(entry for held in inside if isinstance(held, dict) for entry in held.values())]
        tensors = {Nameless(id(entry)): entry for entry in kept if isinstance(entry, Tensor)}
        return {"__wrapped__": value.__wrapped__, NAMELESS: value.cache_info().misses, **tensors}

    return replace(_held(path, read, lambda old: value.cache_clear()), is_emptied=True)


def _class(kind: type) -> Iterator[Held]:
    """What a user's class holds, and what its functions can reach."""
    for base in kind.__mro__:
        if not _is_users(base):
            continue
        functions = {n: _function_of(v) for n, v in vars(base).items() if _function_of(v) is not None}

        def read(base: type = base) -> dict[str, Any]:
            held = vars(base).items()
            return {n: v for n, v in held if not n.startswith("__") and not hasattr(v, "__get__")}

        def write(old: dict[str, Any], base: type = base) -> None:
            for name in [name for name in read(base) if name not in old]:
                delattr(base, name)
            for name, entry in old.items():
                setattr(base, name, entry)

        yield _held(base.__name__, read, write)
        yield _held(base.__name__, lambda functions=functions: functions, lambda old: None)  # type: ignore[misc]


def _function(path: str, function: types.FunctionType) -> Iterator[Held]:
    """A user's function: its closure, and the globals that it names."""
    if not _is_users_file(function.__code__.co_filename):
        return
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read_cells() -> dict[str, Any]:
        return {n: c.cell_contents for n, c in cells.items() if n != "__class__" and _is_filled(c)}

    def write_cells(old: dict[str, Any]) -> None:
        for name, entry in old.items():
            cells[name].cell_contents = entry

    yield _held(path, read_cells, write_cells)
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    yield _globals(function.__module__ or path, function.__globals__, names)
    defaults: dict[Any, Any] = {
        **dict(enumerate(function.__defaults__ or ())),
        **(function.__kwdefaults__ or {}),
    }
    yield _held(path, lambda: defaults, lambda old: None)
    yield _held(path, lambda: dict(vars(function)), lambda old: _reset(vars(function), old))


def _globals(path: str, held: dict[str, Any], names: Iterable[str]) -> Held:
    """Names of a module, those among them too that it does not have yet."""

    def write(old: dict[str, Any]) -> None:
        for name in [name for name in names if name in held and name not in old]:
            del held[name]
        held.update(old)

    return _held(path, lambda: {n: held[n] for n in names if n in held}, write)


def _held(path: str, read: Callable[[], dict[Any, Any]], write: Callable[[dict[Any, Any]], Any]) -> Held:
    contents = read()
    tensors = {key: value for key, value in contents.items() if isinstance(value, Tensor)}
    values = {key: tensor.detach().clone() for key, tensor in tensors.items() if _can_be_copied(tensor)}
    return Held(path, read, write, contents, {key: version_of(t) for key, t in tensors.items()}, values)


def differs(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a tensor holds something else than its copy."""
    if (tensor.shape, tensor.dtype) != (copy.shape, copy.dtype):
        return True
    a, b = tensor.detach(), copy
    return not bool((a.eq(b) | (a.ne(a) & b.ne(b))).all())


def _can_be_copied(tensor: Tensor) -> bool:
    empty = isinstance(tensor, FakeTensor) or tensor.is_meta or nn.parameter.is_lazy(tensor)
    return not empty and tensor.layout == torch.strided and tensor.nbytes <= _LARGEST_BYTES


def _function_of(entry: Any) -> Any:
    """What is called by the name of an entry of a class; None where that is no function."""
    if isinstance(entry, property | functools.cached_property):
        return entry.fget if isinstance(entry, property) else entry.func
    entry = getattr(entry, "__func__", entry)
    return entry if isinstance(entry, types.FunctionType | _CACHED) else None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _refill(values: Any, old: dict[int, Any]) -> None:
    values.clear()
    values.extend(old.values())


def _reset(values: Any, old: dict[Any, Any]) -> None:
    values.clear()
    values.update(old)


def _is_followed(kind: type) -> bool:
    """The user's objects, plain bags of attributes, and what other libraries make; not torch's, Python's or ours."""
    if _is_users(kind) or kind.__module__ in ("types", "argparse"):
        return kind is not types.MappingProxyType
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_package(file) and not file.startswith(TORCH)


def _is_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and _is_users_file(file))


def _is_users_file(file: str) -> bool:
    return not (is_standard(file) or is_package(file) or file.startswith((PLAIT, TORCH)))
